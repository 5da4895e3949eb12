"""Bytes and kernels between the products of an attention that stores its scores, in PyTorch's calls."""

from workbench.cost.autocast import Autocast
from workbench.cost.eager_traffic import DROPPED, Calls, EagerOperator
from workbench.cost.traffic import Dropout
from workbench.model.layer import Attention

# Of queries, keys and values as batches of heads, and of the result as tokens; backward of their gradients.
HEAD_COPIES = Calls(own=8, kernels=4)
_SCALED = Calls(own=2, kernels=1)
_MASKED = Calls(own=2, kernels=1)  # a sum with a mask that all heads share
_SOFTMAX = EagerOperator(Calls(own=2, kernels=1), Calls(own=3, kernels=1))
# In float32. From a mask's sum, which casts; from scores, which softmax itself reads in float16.
_WIDE_SOFTMAX = EagerOperator(Calls(wide=2, casts=1, kernels=1), Calls(wide=3, casts=1, kernels=1))
_CASTING_SOFTMAX = EagerOperator(Calls(own=1, wide=1, kernels=1), Calls(own=1, wide=2, kernels=1))
_CAST = Calls(casts=1)  # of what is multiplied with values, and of its gradient
_WIDE_DROPPED = DROPPED._replace(own=0.0, wide=DROPPED.own)


def eager_scores(attention: Attention, dropout: Dropout, autocast: Autocast) -> EagerOperator:
    """The calls over scores: scaled, masked where causal, softmax, dropout; without the products.

    Under autocast softmax and dropout are in float32. Scores in bfloat16 without a mask take a cast more
    each way than float16's, which is not counted.

    Source: transformers 5.23, `eager_attention_forward` of BERT, whose masks are sums.
    """
    if autocast is Autocast.OFF:
        steps, dropped, cast = _SOFTMAX, DROPPED, Calls()
        mask = _MASKED if attention.causal else Calls()
    else:
        steps, dropped, cast = _CASTING_SOFTMAX, _WIDE_DROPPED, _CAST
        steps, mask = (_WIDE_SOFTMAX if attention.causal else steps), Calls()
    drop = dropped if dropout is Dropout.MASKED else Calls()
    forward, backward = (_SCALED.then(calls).then(drop).then(cast) for calls in steps[:2])
    return EagerOperator(forward.then(mask), backward)
