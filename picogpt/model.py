"""GPT-2's forward pass: the whole of it, from token ids to logits.

Read from the top: each function uses only those above it, and takes its weights under the names
they have in the checkpoint, so that `**block`, `**attn` and so on bind the parameter tree (drawn
in `loader.py`). Leading batch axes are allowed everywhere. What comes in as float32 goes out as
float32, because constants are Python floats. Arrays of any library will do (see `backend.py`);
none that a caller gave is written to.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); openai/gpt-2,
src/model.py; Vaswani et al., "Attention Is All You Need" (2017), for the equations.

Shapes: n_seq tokens, n_embd channels, n_head heads of d_head = n_embd / n_head channels each.
"""

import math

from .backend import array_module


def gelu(x):
    """Gaussian error linear unit, in the tanh form that GPT-2 was trained with.

    [...] -> [...] (Hendrycks and Gimpel, 2016, section 2)
    """
    tanh = array_module(x).tanh
    return 0.5 * x * (1.0 + tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def softmax(x):
    """Positive numbers that sum to 1 along the last axis; the maximum is taken off so exp is safe.

    [..., n] -> [..., n]
    """
    exp_x = array_module(x).exp(x - x.max(axis=-1, keepdims=True))
    return exp_x / exp_x.sum(axis=-1, keepdims=True)


def layer_norm(x, g, b, eps=1e-5):
    """Mean 0 and variance 1 along the last axis, then gain and bias; GPT-2 was trained so.

    x [..., n_embd], g and b [n_embd] -> [..., n_embd] (Ba et al., 2016)
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred / array_module(x).sqrt(variance + eps) * g + b


def linear(x, w, b):
    """A fully connected layer, as one product of two matrices whatever the leading axes.

    x [..., n_in], w [n_in, n_out], b [n_out] -> [..., n_out]
    """
    return (x.reshape(-1, x.shape[-1]) @ w + b).reshape(*x.shape[:-1], w.shape[-1])


def ffn(x, c_fc, c_proj):
    """Position-wise feed-forward network: up to 4 * n_embd channels and down again.

    x [..., n_seq, n_embd] -> [..., n_seq, n_embd] (Vaswani et al., section 3.3)
    """
    return linear(gelu(linear(x, **c_fc)), **c_proj)


def attention(q, k, v, mask):
    """Scaled dot-product attention; query i sees key j where mask[i, j].

    q [..., n_q, d_head], k and v [..., n_k, d_head], mask [n_q, n_k] -> [..., n_q, d_head]
    (Vaswani et al., equation 1)
    """
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return softmax(array_module(q).where(mask, scores, -math.inf)) @ v


def mha(x, c_attn, c_proj, n_head, mask):
    """Multi-head causal self-attention, all heads at once.

    x [..., n_seq, n_embd], mask [n_seq, n_seq] -> [..., n_seq, n_embd] (Vaswani et al., 3.2.2)
    """
    move = array_module(x).moveaxis
    qkv = linear(x, **c_attn).reshape(*x.shape[:-1], 3, n_head, -1)
    q, k, v = move(qkv, (-3, -2), (0, -3))  # each [..., n_head, n_seq, d_head]
    heads = attention(q, k, v, mask)
    return linear(move(heads, -3, -2).reshape(x.shape), **c_proj)


def transformer_block(x, mlp, attn, ln_1, ln_2, n_head, mask):
    """One layer: attention, then the feed-forward network, each added to the residual stream.

    x [..., n_seq, n_embd] -> [..., n_seq, n_embd]
    """
    x = x + mha(layer_norm(x, **ln_1), **attn, n_head=n_head, mask=mask)
    return x + ffn(layer_norm(x, **ln_2), **mlp)


def gpt2(inputs, wte, wpe, blocks, ln_f, n_head):
    """Token ids to logits: row i scores every token of the vocabulary as the one after inputs[i].

    inputs [n_seq] or [batch, n_seq], integers, n_seq <= n_ctx -> [..., n_seq, n_vocab]
    """
    xp = array_module(wte)
    ids = xp.asarray(inputs)
    positions = xp.arange(ids.shape[-1])
    mask = positions <= positions[:, None]  # [n_seq, n_seq]: key j where j <= i, no later ones
    x = wte[ids] + wpe[positions]
    for block in blocks:
        x = transformer_block(x, **block, n_head=n_head, mask=mask)
    return linear(layer_norm(x, **ln_f), wte.T, 0.0)
