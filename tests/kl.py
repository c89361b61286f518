"""The distance between a stored reference distribution and one's own logits.

Of each position the reference keeps its 32 most likely tokens and the log of the whole sum. So the
distributions are compared on 33 outcomes: those 32 tokens, and one bucket for all others.
Merging outcomes can only lower the divergence, so a large value is never an artefact of the bucket.
"""

import numpy as np


def logsumexp(logits):
    """log(sum(exp(logits))) over the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return np.log(np.exp(logits - top).sum(axis=-1)) + top[..., 0]


def kl_divergence(top_ids, top_logits, reference_logsumexp, logits):
    """KL(reference || logits) in nats, one value per position.

    top_ids, top_logits [n, 32] and reference_logsumexp [n] are the reference, logits
    [n, n_vocab] is what it is compared with. NaN in, NaN out: a bound is tested with `<=`.
    """
    logits = np.asarray(logits, np.float64)
    assert top_ids.shape == top_logits.shape and len(top_ids) == len(logits)

    p = np.exp(np.asarray(top_logits, np.float64) - reference_logsumexp[:, None])
    # The stored logits are float32: where the 32 tokens are nearly everything, p may pass 1.
    p_rest = np.clip(1.0 - p.sum(axis=1), 0.0, 1.0)

    total = logsumexp(logits)
    log_q = np.take_along_axis(logits, top_ids.astype(np.int64), axis=1) - total[:, None]
    others = logits.copy()
    np.put_along_axis(others, top_ids.astype(np.int64), -np.inf, axis=1)
    log_q_rest = logsumexp(others) - total

    rest = np.zeros(len(logits))
    some = p_rest > 0.0
    rest[some] = p_rest[some] * (np.log(p_rest[some]) - log_q_rest[some])
    return (p * (np.log(p) - log_q)).sum(axis=1) + rest
