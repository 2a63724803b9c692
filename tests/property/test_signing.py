"""Any change to anything that is signed is noticed."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import pytest
from fedward_common.signing import (
    Authorization,
    SignatureError,
    authorize,
    decode,
    encode,
    generate,
    keys_by_id,
    open_envelope,
    sign_envelope,
)
from hypothesis import given
from hypothesis import strategies as st

KEY, OTHER = generate(), generate()
KEYS = keys_by_id(KEY.public_key(), OTHER.public_key())

texts = st.text(st.characters(codec="utf-8"))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
payloads = st.dictionaries(texts, values, max_size=5)


@given(st.binary())
def test_base64url_comes_back(data: bytes) -> None:
    assert decode(encode(data)) == data


@given(st.text())
def test_base64url_has_one_spelling(text: str) -> None:
    with contextlib.suppress(SignatureError):
        assert encode(decode(text)) == text


@given(payloads)
def test_what_was_signed_comes_out(payload: dict[str, Any]) -> None:
    assert open_envelope("roster", sign_envelope("roster", payload, KEY), KEYS) == payload


@given(payloads, st.data())
def test_a_changed_text_is_refused(payload: dict[str, Any], data: st.DataObject) -> None:
    envelope = sign_envelope("roster", payload, KEY)
    text = envelope["roster"]
    at = data.draw(st.integers(0, len(text)))
    changed = text[:at] + data.draw(texts) + text[data.draw(st.integers(at, len(text))) :]
    if changed != text:
        with pytest.raises(SignatureError):
            open_envelope("roster", {**envelope, "roster": changed}, KEYS)


@given(st.dictionaries(st.sampled_from(["roster", "key", "signature", "x"]), values))
def test_rubbish_is_refused_as_rubbish(envelope: dict[str, Any]) -> None:
    with pytest.raises(SignatureError):
        open_envelope("roster", envelope, KEYS)


@given(
    st.sampled_from(["GET", "POST"]), texts, st.binary(max_size=64),
    st.sampled_from(["GET", "POST"]), texts, st.binary(max_size=64),
)  # fmt: skip
def test_a_signature_is_for_one_request(
    method: str, target: str, body: bytes, other_method: str, other_target: str, other_body: bytes
) -> None:
    signed = Authorization.parse(authorize(KEY, method, target, body))
    signed.verify(KEY.public_key(), method, target, hashlib.sha256(body).hexdigest())
    with pytest.raises(SignatureError):
        signed.verify(OTHER.public_key(), method, target, hashlib.sha256(body).hexdigest())
    if (method, target, body) != (other_method, other_target, other_body):
        with pytest.raises(SignatureError):
            signed.verify(KEY.public_key(), other_method, other_target, hashlib.sha256(other_body).hexdigest())


@given(st.text())
def test_rubbish_headers_are_refused_as_rubbish(header: str) -> None:
    with pytest.raises(SignatureError):
        Authorization.parse(header)
