"""How the terms of many tokens become one loss: a weight for every token, over the global batch.

Lengths are those of every trajectory that counts, on all ranks and in all
micro-batches, so the weight of a token does not depend on where the batch is cut
nor on which trajectories happen to have no advantage. Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Aggregate = Literal["token", "sequence", "constant", "sum"]


def token_weights(lengths: Sequence[int], aggregate: Aggregate, longest: int) -> list[float]:
    """What each sampled token of a trajectory weighs, one number a trajectory; B trajectories of n_i tokens.

    ``token``: ``1 / sum n`` (DAPO, arXiv:2503.14476). ``sequence``: ``1 / (B n_i)``, the
    mean of each trajectory's mean (GRPO, arXiv:2402.03300; GSPO). ``constant``:
    ``1 / (B longest)``, where ``longest`` is the most tokens a reply may have, so no
    length is favoured (Dr. GRPO, arXiv:2503.20783). ``sum``: ``1 / B``, each
    trajectory's sum (LUSPO, arXiv:2602.05261; RLOO).
    """
    if not lengths:
        return []
    if min(lengths) < 1 or longest < 1:
        raise ValueError(f"lengths must be >= 1, got {min(lengths)} and longest {longest}")
    count = len(lengths)
    if aggregate == "token":
        return [1 / sum(lengths)] * count
    if aggregate == "sequence":
        return [1 / (count * length) for length in lengths]
    if aggregate == "constant":
        return [1 / (count * longest)] * count
    if aggregate == "sum":
        return [1 / count] * count
    raise ValueError(f"no aggregate {aggregate!r}; there are token, sequence, constant and sum")
