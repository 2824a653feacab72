"""Prepares the fork server of the ranks: the first call of a compiled function initializes numba,
which takes half a second, and ranks inherit the result.
"""

import torch

from sbpflow.embedding.ids.loops import warm_up_matrix

warm_up_matrix(torch.int32, torch.int64)
