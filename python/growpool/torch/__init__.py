# SPDX-License-Identifier: Apache-2.0
"""growpool under PyTorch: tensors over growpool's memory, and tensors that grow in place.

Importing this imports no PyTorch: its functions do, and refuse versions that they were not tested
with. docs/pytorch.md says what works and what does not yet.
"""

from growpool.torch._tensors import GrowableTensor, growable, tensor

__all__ = ["GrowableTensor", "growable", "tensor"]
