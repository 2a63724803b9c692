"""Task code in a process of its own: frames, sandbox, the child's loop and the parent's side of it."""
