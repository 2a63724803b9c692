"""Logistic regression on blobs whose position depends on the site; a site's data table may ask for trouble."""

import ctypes
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from fedward_common.task import Data
from torch import nn
from torch.utils.data import TensorDataset


def blobs(site: int, n: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    x = centres[y] + 0.3 * site + 0.8 * torch.randn(n, 2, generator=g)
    return TensorDataset(x, y)


class Toy:
    metric_names = ("accuracy",)

    trouble = ""
    seconds = 0.0

    def model(self) -> nn.Module:
        return nn.Linear(2, 3)

    def data(self, config):
        self.trouble = config.get("trouble", "")
        self.seconds = config.get("seconds", 0.0)
        if self.trouble == "steal":
            # What a malicious bundle would try: whatever it reads here ends in the exception's text.
            raise RuntimeError("stolen: " + ("/" / Path(config["loot"])).read_text())
        site = config.get("site", 0)
        # Three records of each patient.
        patients = [record // 3 for record in range(90)]
        return Data(blobs(site, 90, 1000 + site), blobs(site, 60, 2000 + site), groups=patients)

    def loss(self, model, batch):
        if self.trouble == "raise":
            raise ValueError("patient Jane Roe, born 1970")
        if self.trouble == "segfault":
            ctypes.string_at(0)
        if self.trouble == "hang":
            time.sleep(3600)
        if self.trouble == "memory":
            hog = [bytearray(os.urandom(1) * (64 << 20)) for _ in range(40)]
            return hog
        if self.trouble == "nan":
            return F.cross_entropy(model(batch[0]), batch[1]) * float("nan")
        time.sleep(self.seconds)
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}
