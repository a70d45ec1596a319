"""Tests of the private names of torch that polymp uses, and of what differs from torch.amp."""
