"""GPT-2's forward pass: the whole of it, from token ids to logits.

Read from the top: each function uses only those above it, and takes its weights under the names
they have in the checkpoint, so that `**block`, `**attn` and so on bind the parameter tree (drawn
in `loader.py`). `see` changes nothing unless somebody looks on (see `tracing.py`). Leading batch
axes are allowed everywhere. What comes in as float32 goes out as float32, because constants are
Python floats. Arrays of any library will do (see `backend.py`). Nothing that a caller gave is
written to, but for the cache.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); openai/gpt-2,
src/model.py; Vaswani et al., "Attention Is All You Need" (2017), for the equations.

Shapes: n_seq tokens, n_embd channels, n_head heads of d_head = n_embd / n_head channels each;
n_q tokens are computed now, after n_past that are in the cache; n_k keys are there for them to see.
In the examples np is NumPy.
"""

import math

from .backend import array_module, erf, remember, span


def see(tap, name, x):
    """x, or where somebody looks on what they return: x again, or what to go on with instead."""
    return tap(name, x) if tap else x


def gelu(x, exact=False):
    """Gaussian error linear unit, in the tanh form that GPT-2 was trained with:
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))

    or exact, in the form that it stands for: 0.5 * x * (1 + erf(x / sqrt(2)))

    [...] -> [...] (Hendrycks and Gimpel, 2016, section 2)

    >>> gelu(np.array([-1.0, 0.0, 1.0])).round(2)
    array([-0.16,  0.  ,  0.84])
    """
    y = 0.044715 * x  # from here on in place, which takes half the time for many rows
    y *= x
    y += 1.0
    y *= x
    y *= math.sqrt(2.0 / math.pi)
    y = erf(x / math.sqrt(2.0)) if exact else array_module(x).tanh(y)
    y += 1.0
    y *= x
    y *= 0.5
    return y


def softmax(x):
    """Positive numbers that sum to 1 along the last axis; the maximum is taken off so exp is safe.

    [..., n] -> [..., n]

    >>> softmax(np.array([0.0, 1.0, 2.0])).round(2)
    array([0.09, 0.24, 0.67])
    """
    y = array_module(x).exp(x - x.max(axis=-1, keepdims=True))
    y /= y.sum(axis=-1, keepdims=True)
    return y


def layer_norm(x, g, b, eps=1e-5):
    """Mean 0 and variance 1 along the last axis, then gain and bias; GPT-2 was trained so.

    x [..., n_embd], g and b [n_embd] -> [..., n_embd] (Ba et al., 2016)

    >>> layer_norm(np.array([1.0, 2.0, 3.0]), g=np.ones(3), b=np.zeros(3)).round(2)
    array([-1.22,  0.  ,  1.22])
    """
    n_embd = x.shape[-1]
    centred = x - x.sum(axis=-1, keepdims=True) / n_embd
    variance = (centred * centred).sum(axis=-1, keepdims=True) / n_embd
    return centred / array_module(x, g, b).sqrt(variance + eps) * g + b


def linear(x, w, b=None):
    """A fully connected layer, as one product of two matrices whatever the leading axes.

    x [..., n_in], w [n_in, n_out], b [n_out] or none -> [..., n_out]

    >>> linear(np.array([1.0, 2.0]), w=np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]))
    array([1., 2., 3.])
    """
    y = x.reshape(-1, x.shape[-1]) @ w
    if b is not None:
        y += b
    return y.reshape(*x.shape[:-1], w.shape[-1])


def ffn(x, c_fc, c_proj, erf=None, tap=None):
    """Position-wise feed-forward network: up to 4 * n_embd channels and down again.

    A model whose gelu is the exact one has the key erf, an empty array.

    x [..., n_seq, n_embd] -> [..., n_seq, n_embd] (Vaswani et al., section 3.3)
    """
    act = see(tap, "mlp.act", gelu(linear(x, **c_fc), erf is not None))
    return see(tap, "mlp.out", linear(act, **c_proj))


def attention(q, k, v, mask, tap=None):
    """Scaled dot-product attention; query i sees key j where mask[i, j].

    q [..., n_q, d_head], k and v [..., n_k, d_head], mask [..., n_q, n_k] -> [..., n_q, d_head]
    (Vaswani et al., equation 1)

    >>> q, k, v = np.zeros((3, 4)), np.ones((3, 4)), np.array([[2.0], [4.0], [6.0]])
    >>> attention(q, k, v, mask=np.tri(3, dtype=bool)).round(2).tolist()  # means of what is seen
    [[2.0], [3.0], [4.0]]
    """
    scores = q / math.sqrt(q.shape[-1]) @ k.swapaxes(-1, -2)
    masked = array_module(q, k, v, mask).where(mask, scores, -math.inf)
    return see(tap, "attn.weights", softmax(masked)) @ v


def mha(x, c_attn, c_proj, n_head, mask, past=None, tap=None):
    """Multi-head causal self-attention, all heads at once; `past` is (this layer's cache, n_past).

    x [..., n_q, n_embd], mask [..., n_q, n_k] -> [..., n_q, n_embd] (Vaswani et al., 3.2.2)
    """
    qkv = linear(x, **c_attn).reshape(*x.shape[:-1], 3 * n_head, -1).swapaxes(-2, -3)
    q, k, v = (qkv[..., i : i + n_head, :, :] for i in range(0, 3 * n_head, n_head))
    if past:
        k, v = remember(past, k, v)
    heads = see(tap, "attn.heads", attention(q, k, v, mask, tap))  # [..., n_head, n_q, d_head]
    return see(tap, "attn.out", linear(heads.swapaxes(-2, -3).reshape(x.shape), **c_proj))


def transformer_block(x, mlp, attn, ln_1, ln_2, n_head, mask, past=None, tap=None):
    """One layer: attention, then the feed-forward network, each added to the residual stream.

    x [..., n_q, n_embd], mask [..., n_q, n_k] -> [..., n_q, n_embd]
    """
    x = x + mha(layer_norm(x, **ln_1), **attn, n_head=n_head, mask=mask, past=past, tap=tap)
    return see(tap, "out", x + ffn(layer_norm(x, **ln_2), **mlp, tap=tap))


def gpt2(inputs, wte, wpe, blocks, ln_f, n_head, *,
         lm_head=None, n_pad=0, cache=None, last=False, tap=None):  # fmt: skip
    """Token ids to logits: row i scores every token of the vocabulary as the one after inputs[i].

    wte, wpe, blocks and ln_f are the parameter tree of `load`, n_head is the number of heads.
    With a cache (see `new_cache`), inputs are the tokens after those it has seen. The first n_pad
    tokens of all, or of each row ([batch]), are padding. With `last`, only the last row is made.
    The output head is the embedding of the tokens, unless the model has an lm_head of its own.
    tap(name, x) sees what is computed on the way, and returns it or what to go on with: "embed",
    "h0.attn.weights", "h0.attn.heads", "h0.attn.out", "h0.mlp.act", "h0.mlp.out", "h0.out" and so
    on, "ln_f", "logits".

    inputs [n_q] or [batch, n_q], integers, n_past + n_q <= n_ctx -> [..., n_q, n_vocab]

    >>> from picogpt import gpt2, load
    >>> encoder, hparams, params = load("tales")
    >>> logits = gpt2(encoder.encode("Once upon a"), **params, n_head=hparams["n_head"])
    >>> logits.shape, encoder.decode([logits[-1].argmax()])
    ((3, 4096), ' time')
    """
    xp = array_module(wte, wpe, lm_head, inputs)
    ids, pads = xp.asarray(inputs), xp.asarray(n_pad)[..., None, None, None]
    n_past, n_k = span(cache, ids.shape[-1])
    keys, queries = xp.arange(n_k), n_past + xp.arange(ids.shape[-1])[:, None]
    # By position: no key that comes later; padding for padding only, which must see something.
    mask = (keys <= queries) & ((keys >= pads) | (queries < pads))
    x = see(tap, "embed", wte[ids] + wpe[xp.maximum(queries[:, 0] - pads[..., 0, 0], 0)])
    for i, block in enumerate(blocks):
        past = cache and (cache["blocks"][i], n_past)
        inner = tap and (lambda name, x, i=i: tap(f"h{i}.{name}", x))
        x = transformer_block(x, **block, n_head=n_head, mask=mask, past=past, tap=inner)
    if cache:
        cache["n_past"] += ids.shape[-1]
    x = see(tap, "ln_f", layer_norm(x[..., -1:, :] if last else x, **ln_f))
    return see(tap, "logits", linear(x, (wte if lm_head is None else lm_head).T))
