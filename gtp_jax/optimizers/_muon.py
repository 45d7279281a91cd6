"""Muon, with the iterations of each matrix on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState

from ..train import Placed, placed_in
from ._matrices import Matrices
from ._owners import on_owners

Tree = Any
Scalar = jax.typing.ArrayLike


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps_root: Scalar = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: Scalar | None = None,
    iteration_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `optax.contrib.muon`, in which one rank iterates each matrix, instead of every rank all matrices.

    In a step of `train_step` on a mesh, the ranks share the matrices, balanced by work. An all-to-all brings the parts
    of a matrix to its owner, and another one the parts of its update back. Parameters and momentum stay sharded as they
    are, the state is that of `optax.contrib.muon`, and updates differ from its by rounding alone. Elsewhere, as on one
    device or in a step of your own, this is `optax.contrib.muon`, in the dtype of iterations that is given.

    The layers of a list are shared, and so are experts along a leading dimension that
    `muon_weight_dimension_numbers` leaves out. If the model has a `Stack`, put `gtp_jax.train.per_layer` around, which
    makes a matrix of each layer.

    The arguments are those of `optax.contrib.muon`, and one more. By default it updates all arrays of two
    dimensions, and AdamW the rest: of stock Flax, it updates the embeddings and the attention's biases, `(heads,
    head_dim)`, but not the attention's kernels, which have three. `muon_weight_dimension_numbers` chooses otherwise.

    Args:
        iteration_dtype: the dtype in which real matrices travel and are iterated: bfloat16, float32, float64, or
            `None`, that of the momentum, as in Optax. In bfloat16, as in Muon's first publication, iterations are
            faster on GPUs, and updates differ by some percent, which is less than the spread that their singular values
            have anyway.

    Raises:
        ValueError: for the reasons that `optax.contrib.muon` has; if `iteration_dtype` is another; or if it is bfloat16
            with `preconditioning="spectral"`, for which JAX has no decomposition.
    """
    iterated = None if iteration_dtype is None else _iteration_dtype(iteration_dtype, preconditioning)
    dims = muon_weight_dimension_numbers
    whole = optax.contrib.muon(
        learning_rate,
        ns_coeffs,
        ns_steps,
        beta,
        eps,
        weight_decay,
        weight_decay_mask,
        mu_dtype,
        nesterov=nesterov,
        adaptive=adaptive,
        preconditioning=preconditioning,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps_root=adam_eps_root,
        adam_weight_decay=adam_weight_decay,
        adam_learning_rate=adam_learning_rate,
        muon_weight_dimension_numbers=dims,
        consistent_rms=consistent_rms,
    )

    def iterate(matrices: jax.Array, ns_coeffs: jax.Array, eps: Scalar = eps) -> jax.Array:
        # Without decay, the momentum is the gradient, so this iterates the matrices themselves. A number as `eps` keeps
        # bfloat16 what it is, and an array must have its dtype.
        if iterated and isinstance(eps, jax.Array):
            eps = eps.astype(jnp.finfo(matrices.dtype).dtype)
        one: Any = optax.contrib.scale_by_muon(
            ns_steps=ns_steps,
            beta=0.0,
            eps=eps,
            nesterov=False,
            preconditioning=preconditioning,
            weight_dimension_numbers=MuonDimensionNumbers(1, 2),
        )
        state = MuonState(jnp.zeros((), jnp.int32), jnp.zeros_like(matrices), ns_coeffs)
        return one.update(matrices, state)[0]

    def orthogonal(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        del params
        count: Any = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        corrected: Any = optax.tree.bias_correction
        if nesterov:
            ahead = corrected(mu, beta, optax.safe_increment(count))
            now = corrected(updates, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        else:
            momentum = corrected(mu, beta, count)
        leaves, structure = jax.tree.flatten(momentum)
        every = jax.tree.leaves(_dimensions(dims, updates), is_leaf=_is_dimensions)
        matrices = [_matrices(*one) for one in zip(leaves, placed_in(momentum), every, strict=True)]
        more = (state.ns_coeffs, *((eps,) if isinstance(eps, jax.Array) else ()))
        given = [leaf.astype(iterated) if iterated and jnp.isrealobj(leaf) else leaf for leaf in leaves]
        if any(placed_in(momentum)):
            found = on_owners(iterate, _cost, given, matrices, *more)
        else:
            run = lambda given: iterate(given, *more)  # noqa: E731
            found = [one.whole(run, leaf) for one, leaf in zip(matrices, given, strict=True)]
        found = [result.astype(leaf.dtype) for result, leaf in zip(found, leaves, strict=True)]
        found = jax.tree.unflatten(structure, found)
        if adaptive:
            found = jax.tree.map(lambda x, y: jnp.sum(x.conj() * y) * y, momentum, found)
        kept = mu if mu_dtype is None else optax.tree.cast(mu, jax.dtypes.canonicalize_dtype(mu_dtype))
        return found, MuonState(count, kept, state.ns_coeffs)

    def scaled(updates: Tree, params: Tree = None) -> Tree:
        del params
        scale = lambda u, own: _scale(*_fans(u.shape, own), consistent_rms) * u  # noqa: E731
        return jax.tree.map(scale, updates, _dimensions(dims, updates))

    def labels(params: Tree) -> Tree:
        label = lambda own: "adam" if own is None else "muon"  # noqa: E731
        return jax.tree.map(label, _dimensions(dims, params), is_leaf=_is_dimensions)

    shared = optax.partition(
        {
            "muon": optax.chain(
                optax.GradientTransformation(optax.init_empty_state, orthogonal),  # `whole` makes the state
                optax.stateless(scaled),
                optax.add_decayed_weights(weight_decay, weight_decay_mask),
                optax.scale_by_learning_rate(learning_rate),
            ),
            "adam": optax.adamw(
                learning_rate if adam_learning_rate is None else adam_learning_rate,
                b1=adam_b1,
                b2=adam_b2,
                eps=eps,
                eps_root=adam_eps_root,
                weight_decay=adam_weight_decay,
                mu_dtype=mu_dtype,
                nesterov=nesterov,
            ),
        },
        labels,
    )

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        own = shared if iterated or any(placed_in(updates)) else optax.with_extra_args_support(whole)
        return own.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(whole.init, update)


def _iteration_dtype(dtype: Any, preconditioning: str) -> np.dtype:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    # norms of float16, which has few exponents, overflow or vanish
    if name not in ("bfloat16", "float32", "float64"):
        raise ValueError(f"`iteration_dtype` is {name}. Use bfloat16, float32 or float64; or `None`, as in Optax.")
    if name == "bfloat16" and preconditioning == "spectral":
        raise ValueError(
            '`preconditioning="spectral"` takes norms that JAX does not compute in bfloat16. Use another '
            "preconditioning, or `iteration_dtype=None`."
        )
    return jax.dtypes.canonicalize_dtype(dtype)


def _cost(rows: int, columns: int) -> float:
    """Returns the multiplications of an iteration of X, which has fewer rows than columns or is transposed: those of
    A = X X^T, of A A, and of a multiple of these by X."""
    small, large = sorted((rows, columns))
    return small * small * (2 * large + small)


def _dimensions(given: Any, tree: Tree) -> Tree:
    """Returns `MuonDimensionNumbers` for each leaf of a tree, or `None` for those that Muon does not update.

    Args:
        given: the argument of `muon`: `None`, a tree that may be a prefix, or a function that returns one.
        tree: the parameters or their gradients, some of which may be masked.
    """
    if given is None:
        return jax.tree.map(lambda leaf: MuonDimensionNumbers() if leaf.ndim == 2 else None, tree)
    prefix = given(tree) if callable(given) else given
    spread = lambda own, below: jax.tree.map(lambda _: own, below)  # noqa: E731
    return jax.tree.map(spread, prefix, tree, is_leaf=_is_dimensions)


def _is_dimensions(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


def _axes(dims: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    return tuple(dim % ndim for dim in ((dims,) if isinstance(dims, int) else dims))


def _matrices(leaf: jax.Array, placed: Placed | None, dims: MuonDimensionNumbers) -> Matrices:
    own = MuonDimensionNumbers() if leaf.ndim == 2 else dims  # as optax has it
    rows, columns = _axes(own.reduction_axis, leaf.ndim), _axes(own.output_axis, leaf.ndim)
    return Matrices(leaf.shape, PartitionSpec() if placed is None else placed.spec, rows, columns)


def _fans(shape: tuple[int, ...], dims: MuonDimensionNumbers) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs of the matrices in an array."""
    ins, outs = _axes(dims.reduction_axis, len(shape)), _axes(dims.output_axis, len(shape))
    return math.prod(shape[dim] for dim in ins), math.prod(shape[dim] for dim in outs)


def _scale(fan_in: int, fan_out: int, consistent_rms: Scalar | None) -> jax.Array:
    if consistent_rms is None:
        return jnp.sqrt(jnp.maximum(1, fan_out / fan_in))
    return jnp.sqrt(jnp.maximum(fan_in, fan_out)) * consistent_rms
