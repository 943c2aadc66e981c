"""InvariantSampler: the Sampler of a batch-invariant engine on a GPU.

What torch does there with one row changes with the others: its softmax adds up from where a row
begins in memory, its cumulative sums and its search for the largest k are cut by the number of
rows. So a token is drawn by the kernels here as well, whatever else is asked for in its batch;
log probabilities are those of lmscope_kernels.log_softmax, one program a row; and of equal ones
those with the lowest ids are reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lmscope_kernels.log_softmax import log_softmax
from torch import Tensor

from lmscope.boundary import LogprobsLists
from lmscope.execute.device_sampler import DeviceSampler
from lmscope.execute.logits_adjustment import adjusted_logits
from lmscope.execute.sampler import Sampler, SamplerOutput, errors_of
from lmscope.execute.sampling_row import SamplingRow
from lmscope.execute.token_logprobs import gather_logprobs

__all__ = ["InvariantSampler"]


class InvariantSampler(Sampler):
    """As a Sampler; a row gets the same bits alone and in any batch.

    draws    what draws for the other batches too; one that is for batch-invariant engines
    """

    def __init__(self, vocab_size: int, draws: DeviceSampler) -> None:
        super().__init__(vocab_size)
        self._draws = draws

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        assert logits.shape == (len(rows), self.vocab_size)
        batch = self._batch_of(rows, logits.device)
        changes = batch.changes()
        token_ids, best = self._draws.sample(adjusted_logits(logits, changes), rows)
        logprobs = self._logprobs(batch, logits, changes, token_ids)
        return SamplerOutput(token_ids.tolist(), logprobs, errors_of(best))

    def _log_probabilities(self, logits: Tensor, token_ids: Tensor, k: int) -> LogprobsLists:
        return gather_logprobs(log_softmax(logits), token_ids, k, are_ties_by_id=True)
