"""The simulator's inner loops: compiled, outside the GIL, calling libmujoco directly.

Numba compiles them, so no C++ compiler is needed. libmujoco is the library inside the `mujoco` wheel, the very
one that dm_control steps; its functions are found by name. A world (mjModel and mjData) is a row of addresses,
and a task sees it as a `Physics` of arrays.

Arithmetic is the same for every trajectory, whichever trajectories share its chunk: the policy works on blocks of
four observations, filled up with zeros, and sums in a fixed order. So results do not depend on chunks or threads.

All that is kept on disk (`kept`) is in this file, because Numba recompiles only when a function's own file changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import llvmlite.binding
import mujoco
import numba
import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from pbrl.types import Bool, Float32, Float64, Int64

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a task's function, anew in each process."""
    return cast(Function, numba.njit(nogil=True, error_model="numpy")(function))


def kept(function: Function) -> Function:
    """Compile and keep the result on disk, so that only the first use ever waits. For this file only."""
    return cast(Function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def is_kept() -> bool:
    """Whether the loops below were compiled before, so that nobody waits for them now."""
    return any((Path(__file__).parent / "__pycache__").glob("native.run_episodes-*.nbi"))


def _fused(function: Function) -> Function:
    """As `kept`, with multiply-and-add in one instruction."""
    return cast(
        Function,
        numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "nsz"})(function),
    )


# --------------------------------------------------------------------------------------------------- MuJoCo


def _load_libmujoco() -> None:
    """Make libmujoco's functions known by name to compiled code."""
    folder = Path(mujoco.__file__).parent
    names = ("libmujoco.so", "libmujoco.", "mujoco.dll")
    libraries = [path for path in sorted(folder.iterdir()) if path.name.startswith(names)]
    if not libraries:
        raise ImportError(f"there is no libmujoco in {folder}: install the `mujoco` package from its wheel")
    llvmlite.binding.load_library_permanently(str(libraries[0]))


_load_libmujoco()
_step = types.ExternalFunction("mj_step", types.void(types.intp, types.intp))
_step1 = types.ExternalFunction("mj_step1", types.void(types.intp, types.intp))
_step2 = types.ExternalFunction("mj_step2", types.void(types.intp, types.intp))


class Physics(NamedTuple):
    """The parts of one world's mjData that observations and rewards are made of, as views."""

    qpos: Float64  # [nq]
    qvel: Float64  # [nv]
    act: Float64  # [na]
    ctrl: Float64  # [nu]
    sensordata: Float64  # [nsensordata]
    xpos: Float64  # [nbody, 3]
    xmat: Float64  # [nbody, 9]: xx, xy, xz, yx, yy, yz, zx, zy, zz
    xipos: Float64  # [nbody, 3]
    geom_xpos: Float64  # [ngeom, 3]
    geom_xmat: Float64  # [ngeom, 9]


# A row of addresses: model, data, the counters of four warnings, then address and length of each field above.
ROW_SIZE = 6 + 2 * len(Physics._fields)
# The warnings with which MuJoCo gives up on a state and resets it, or ignores the controls.
_INVALID = ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC", "mjWARN_BADCTRL")


def addresses(physics: Any) -> Int64:
    """The row of addresses of a dm_control `Physics`, valid for as long as that object lives."""
    warnings = physics.data.warning.number
    if warnings.dtype != np.int32:
        raise ImportError(f"this MuJoCo counts its warnings in {warnings.dtype}, not int32; see pyproject.toml")
    row = [physics.model.ptr._address, physics.data.ptr._address]
    row += [warnings[int(getattr(mujoco.mjtWarning, name)) :].ctypes.data for name in _INVALID]
    for field in Physics._fields:
        array = getattr(physics.data, field)
        row += [array.ctypes.data, len(array)]
    return np.array(row, dtype=np.int64)


def dynamics(environment: Any) -> tuple[Float64, Float64, int, bool]:
    """How a dm_control environment steps: action bounds, physics steps in a control step, whether by RK4."""
    spec = environment.action_spec()
    runge_kutta = environment.physics.model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4.value
    return (
        np.array(spec.minimum, np.float64),
        np.array(spec.maximum, np.float64),
        int(environment._n_sub_steps),
        bool(runge_kutta),
    )


def _pointer_to(kind: types.Type) -> Any:
    """A function for compiled code that turns an address into a pointer to `kind`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uintp), generate

    return pointer


_doubles, _counter, _integers = _pointer_to(types.float64), _pointer_to(types.int32), _pointer_to(types.int64)


@kept
def physics_at(row: Int64) -> Physics:
    """The world behind a row of addresses."""
    return Physics(
        qpos=carray(_doubles(row[6]), (row[7],)),
        qvel=carray(_doubles(row[8]), (row[9],)),
        act=carray(_doubles(row[10]), (row[11],)),
        ctrl=carray(_doubles(row[12]), (row[13],)),
        sensordata=carray(_doubles(row[14]), (row[15],)),
        xpos=carray(_doubles(row[16]), (row[17], 3)),
        xmat=carray(_doubles(row[18]), (row[19], 9)),
        xipos=carray(_doubles(row[20]), (row[21], 3)),
        geom_xpos=carray(_doubles(row[22]), (row[23], 3)),
        geom_xmat=carray(_doubles(row[24]), (row[25], 9)),
    )


Look = Callable[[int, int], float]


def make_look(
    observe: Callable[[Physics, Any, Float64], None],
    reward: Callable[[Physics, Any], float],
    constants: Any,
    obs_size: int,
) -> Look:
    """A task's `observe` and `reward` as one function of two addresses: a row, and an observation to fill.

    Its type is the same for all tasks, so that the loops below are compiled once for all of them.
    """

    @numba.cfunc(types.float64(types.uintp, types.uintp), error_model="numpy")  # type: ignore[untyped-decorator]
    def look(row: int, obs: int) -> float:
        physics = physics_at(carray(_integers(row), (ROW_SIZE,)))
        observe(physics, constants, carray(_doubles(obs), (obs_size,)))
        return reward(physics, constants)

    return cast(Look, look)


@kept
def _control_step(row: Int64, action: Float64, low: Float64, high: Float64, sub_steps: int, runge_kutta: bool) -> bool:
    """Apply the clipped action for one control step, in dm_control's order; False if the physics became invalid.

    dm_control ends on the first half of a physics step, so that what it observes belongs to the new state.
    """
    model, data = row[0], row[1]
    ctrl = carray(_doubles(row[12]), (row[13],))
    for i in range(len(action)):
        ctrl[i] = min(max(action[i], low[i]), high[i]) if action[i] == action[i] else np.nan
    if runge_kutta:
        _step(model, data)
    else:
        _step2(model, data)
    for _ in range(sub_steps - 1):
        _step(model, data)
    _step1(model, data)
    warnings = 0
    for i in range(2, 6):
        warnings += carray(_counter(row[i]), (1,))[0]
    return warnings == 0


# --------------------------------------------------------------------------------------------------- policy

BLOCK = 4  # observations that share one pass over the weights
LANES = 8  # outputs of a layer are padded to a multiple of this


def padded(size: int) -> int:
    """The width at which a layer of `size` outputs is stored for the loops."""
    return -(-size // LANES) * LANES


@_fused
def _tanh(x: Float32, columns: int) -> None:
    """tanh in place: a rational approximation, within 4e-7 of the true value, that compiles to vector code."""
    for row in range(4):
        for j in range(columns):
            y = min(max(x[row, j], np.float32(-7.9053111)), np.float32(7.9053111))
            y2 = y * y
            p = np.float32(-2.76076847742355e-16)
            p = p * y2 + np.float32(2.00018790482477e-13)
            p = p * y2 + np.float32(-8.60467152213735e-11)
            p = p * y2 + np.float32(5.12229709037114e-08)
            p = p * y2 + np.float32(1.48572235717979e-05)
            p = p * y2 + np.float32(6.37261928875436e-04)
            p = p * y2 + np.float32(4.89352455891786e-03)
            q = np.float32(1.19825839466702e-06)
            q = q * y2 + np.float32(1.18534705686654e-04)
            q = q * y2 + np.float32(2.26843463243900e-03)
            q = q * y2 + np.float32(4.89352518554385e-03)
            x[row, j] = y * p / q


@_fused
def _affine(x: Float32, inputs: int, weights: Float32, bias: Float32, out: Float32) -> None:
    """out = x weights + bias for a block of four rows, four inputs at a time to reuse what is in registers."""
    outputs = len(bias)
    for row in range(4):
        for j in range(outputs):
            out[row, j] = bias[j]
    k = 0
    while k + 4 <= inputs:
        a0, a1, a2, a3 = x[0, k], x[0, k + 1], x[0, k + 2], x[0, k + 3]
        b0, b1, b2, b3 = x[1, k], x[1, k + 1], x[1, k + 2], x[1, k + 3]
        c0, c1, c2, c3 = x[2, k], x[2, k + 1], x[2, k + 2], x[2, k + 3]
        d0, d1, d2, d3 = x[3, k], x[3, k + 1], x[3, k + 2], x[3, k + 3]
        for j in range(outputs):
            w0, w1, w2, w3 = weights[k, j], weights[k + 1, j], weights[k + 2, j], weights[k + 3, j]
            out[0, j] = out[0, j] + a0 * w0 + a1 * w1 + a2 * w2 + a3 * w3
            out[1, j] = out[1, j] + b0 * w0 + b1 * w1 + b2 * w2 + b3 * w3
            out[2, j] = out[2, j] + c0 * w0 + c1 * w1 + c2 * w2 + c3 * w3
            out[3, j] = out[3, j] + d0 * w0 + d1 * w1 + d2 * w2 + d3 * w3
        k += 4
    while k < inputs:
        for row in range(4):
            a = x[row, k]
            for j in range(outputs):
                out[row, j] += a * weights[k, j]
        k += 1


@kept
def _forward(packed: Float32, sizes: Int64, block: Float32, spare: Float32) -> Float32:
    """The tanh network's output for the block of four inputs; works in both buffers, returns where it ended."""
    offset = 0
    for layer in range(len(sizes) - 1):
        inputs, outputs = sizes[layer], (sizes[layer + 1] + LANES - 1) // LANES * LANES
        weights = packed[offset : offset + inputs * outputs].reshape(inputs, outputs)
        offset += inputs * outputs
        bias = packed[offset : offset + outputs]
        offset += outputs
        _affine(block, inputs, weights, bias, spare)
        if layer < len(sizes) - 2:
            _tanh(spare, outputs)
        block, spare = spare, block
    return block


@kept
def mean_actions(packed: Float32, sizes: Int64, policy: Int64, obs: Float32, out: Float32) -> None:
    """Write the mean action [n, act] of each row's own policy; rows of one policy are fastest side by side.

    packed: [K, size] parameters, each layer's outputs padded. policy: [n] rows of packed. obs: [n, obs].
    """
    rows, act_size = out.shape
    width = (sizes.max() + LANES - 1) // LANES * LANES
    block, spare = np.zeros((BLOCK, width), np.float32), np.zeros((BLOCK, width), np.float32)
    begin = 0
    while begin < rows:
        end = begin
        block[:] = 0
        while end < rows and end < begin + BLOCK and policy[end] == policy[begin]:
            for j in range(obs.shape[1]):
                block[end - begin, j] = obs[end, j]
            end += 1
        mean = _forward(packed[policy[begin]], sizes, block, spare)
        for i in range(begin, end):
            for j in range(act_size):
                out[i, j] = mean[i - begin, j]
        begin = end


# --------------------------------------------------------------------------------------------------- loops


@kept
def observe_all(look: Look, rows: Int64, obs: Float64) -> None:
    """Fill the observation [n, obs] of each row's present state."""
    for i in range(len(rows)):
        look(rows[i].ctypes.data, obs[i].ctypes.data)


@kept
def step_all(
    look: Look,
    rows: Int64,
    actions: Float64,
    low: Float64,
    high: Float64,
    sub_steps: int,
    runge_kutta: bool,
    obs: Float64,
    rewards: Float64,
    diverged: Bool,
) -> None:
    """One control step of each row that has not diverged: fills obs [n, obs], rewards [n], diverged [n]."""
    for i in range(len(rows)):
        rewards[i] = 0.0
        if not diverged[i]:
            diverged[i] = not _control_step(rows[i], actions[i], low, high, sub_steps, runge_kutta)
            if not diverged[i]:
                rewards[i] = look(rows[i].ctypes.data, obs[i].ctypes.data)


@kept
def run_episodes(
    look: Look,
    rows: Int64,
    low: Float64,
    high: Float64,
    sub_steps: int,
    runge_kutta: bool,
    packed: Float32,
    sizes: Int64,
    std: Float32,
    policy: Int64,
    noise: Float32,
    rewards: Float64,
    observations: Float32,
    actions: Float32,
    lengths: Int64,
    diverged: Bool,
) -> None:
    """Whole episodes of n rows in lockstep, each under its policy: fills the last five arguments.

    std: [K, act]. noise: [n, T, act], or empty for mean actions. rewards: [n, T]. observations: [n, T + 1, obs]
    and actions: [n, T, act], or empty if nobody asked for them. A row that diverges keeps its last observation.
    """
    n, steps = rewards.shape
    obs_size, act_size = sizes[0], len(low)
    obs, obs32 = np.zeros((n, obs_size)), np.zeros((n, obs_size), np.float32)
    mean, action = np.zeros((n, act_size), np.float32), np.zeros(act_size)
    observe_all(look, rows, obs)
    for t in range(steps + 1):
        for i in range(n):
            for j in range(obs_size):
                obs32[i, j] = obs[i, j]
                if len(observations):
                    observations[i, t, j] = obs32[i, j]
        if t == steps:
            break
        mean_actions(packed, sizes, policy, obs32, mean)
        for i in range(n):
            if diverged[i]:
                continue
            for j in range(act_size):
                if len(noise):
                    mean[i, j] += std[policy[i], j] * noise[i, t, j]
                if len(actions):
                    actions[i, t, j] = mean[i, j]
                action[j] = mean[i, j]
            if _control_step(rows[i], action, low, high, sub_steps, runge_kutta):
                rewards[i, t] = look(rows[i].ctypes.data, obs[i].ctypes.data)
            else:
                diverged[i], lengths[i], rewards[i, t] = True, t, 0.0
