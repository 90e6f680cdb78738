"""On-policy distillation: the policy samples, and a teacher says of each token how likely it finds it.

The advantage of a token is ``sg[log teacher - log policy]``, a one-sample estimate
of what it takes off the reverse KL(policy || teacher), token by token without a
return to go (GKD, arXiv:2306.13649, with its on-policy student; Thinking Machines
2025, "On-policy distillation"). No reward enters. Teacher and policy must mean the
same thing by a token's number, so two vocabularies are refused. Pure Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from palestra.errors import ConfigError


def distillation_weights(
    teacher_logprobs_N: Sequence[float], policy_logprobs_N: Sequence[float], normalizers_N: Sequence[float]
) -> array[float]:
    """Each target's advantage towards the teacher, times its normaliser."""
    columns = zip(teacher_logprobs_N, policy_logprobs_N, normalizers_N, strict=True)
    return array("f", (normalizer * (teacher - own) for teacher, own, normalizer in columns))


def require_one_vocabulary(policy: Sequence[bytes], teacher: Sequence[bytes], named: str) -> None:
    """Refuse a teacher whose tokens are not the policy's; both give each token's bytes in the order of ids.

    Raises ConfigError with the first token that differs.
    """
    if list(policy) == list(teacher):
        return
    shared = min(len(policy), len(teacher))
    first = next((n for n in range(shared) if policy[n] != teacher[n]), shared)
    own, other = (show[first] if first < len(show) else None for show in (policy, teacher))
    raise ConfigError(
        [
            f"algorithm.reference: {named} has another vocabulary than the model ({len(teacher)} tokens, not "
            f"{len(policy)}; token {first} is {_shown(other)}, not {_shown(own)}), so its logprobs would be "
            "those of other words; nearest: a model of the same family and tokenizer"
        ],
        next_command="palestra config show",
    )


def _shown(token: bytes | None) -> str:
    return "missing" if token is None else repr(token.decode("utf-8", errors="replace"))
