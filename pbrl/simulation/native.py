"""The simulator's inner loops: compiled, outside the GIL, calling libmujoco directly.

Numba compiles them, so no C++ compiler is needed. libmujoco is the library inside the `mujoco` wheel, the same one
that dm_control uses; its functions are found by name. A world (mjModel and mjData) is a row of addresses, and a task
sees it as a `Physics` of arrays.

The arithmetic of a trajectory does not depend on which others share its chunk: the policy works on blocks of four
observations, padded with zeros, and sums in a fixed order. So results do not depend on chunks or threads.

Everything that is cached on disk (`cached`), and every structure that it takes, is in this file, because Numba
recompiles a cached function only when the function's own file changes.
"""

from __future__ import annotations

import ctypes
from collections import namedtuple
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


def cached(function: Function) -> Function:
    """Compile and cache the result on disk, so that only the first use ever waits. For this file only."""
    return cast(Function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def is_cached() -> bool:
    """Whether the loops below were compiled before, so that the first collection need not wait for them."""
    return any((Path(__file__).parent / "__pycache__").glob("native.run_episodes-*.nbi"))


def _fused(function: Function) -> Function:
    """As `cached`, with multiply-and-add in one instruction."""
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
    xmat: Float64  # [nbody, 9], with the columns below
    xipos: Float64  # [nbody, 3]
    geom_xpos: Float64  # [ngeom, 3]
    geom_xmat: Float64  # [ngeom, 9]


X, Y, Z = range(3)  # columns of positions
XX, XY, XZ, YX, YY, YZ, ZX, ZY, ZZ = range(9)  # columns of rotation matrices

# The warnings with which MuJoCo gives up on a state and resets it, or ignores the controls.
_INVALID = ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC", "mjWARN_BADCTRL")

_SENSORS_OFF = np.int32(mujoco.mjtDisableBit.mjDSBL_SENSOR)

# A row of addresses: the model, its flags, the data, the counters of these warnings, then address and length of each
# field.
_MODEL, _FLAGS, _DATA, _WARNINGS = range(4)
_FIELDS = _WARNINGS + len(_INVALID)
_AT: Any = namedtuple("_AT", Physics._fields)(*range(_FIELDS, _FIELDS + 2 * len(Physics._fields), 2))
ROW_SIZE = _FIELDS + 2 * len(Physics._fields)


def addresses(physics: Any) -> Int64:
    """The row of addresses of a dm_control `Physics`, valid for as long as that object lives."""
    warnings = physics.data.warning.number
    if warnings.dtype != np.int32:
        raise ImportError(f"this MuJoCo counts its warnings in {warnings.dtype}, not int32; see pyproject.toml")
    row = [physics.model.ptr._address, _disable_flags(physics.model.ptr), physics.data.ptr._address]
    row += [warnings[int(getattr(mujoco.mjtWarning, name)) :].ctypes.data for name in _INVALID]
    for field in Physics._fields:
        array = getattr(physics.data, field)
        row += [array.ctypes.data, len(array)]
    return np.array(row, dtype=np.int64)


def _disable_flags(model: Any) -> int:
    """The address of `opt.disableflags`, what a model switches off: the integer after the arrays that follows it."""
    integers = (ctypes.c_int32 * 16).from_address(model.opt.o_friction.ctypes.data + model.opt.o_friction.nbytes)
    before = [*integers]
    model.opt.disableflags ^= int(_SENSORS_OFF)
    changed = [place for place in range(16) if integers[place] != before[place]]
    model.opt.disableflags ^= int(_SENSORS_OFF)
    if len(changed) != 1:
        raise ImportError("this MuJoCo keeps its flags in another place; see pyproject.toml")
    return ctypes.addressof(integers) + 4 * changed[0]


class Dynamics(NamedTuple):
    """How an environment makes a control step."""

    low: Float64  # [act] bounds of the actions
    high: Float64  # [act]
    sub_steps: int  # physics steps in a control step
    runge_kutta: bool  # whether MuJoCo integrates by RK4
    force_sensors: bool  # whether a sensor measures forces or accelerations
    all_sensors: bool  # whether a sensor must be computed in every physics step, because it remembers


def dynamics(environment: Any) -> Dynamics:
    """How a dm_control environment makes a control step."""
    spec, model = environment.action_spec(), environment.physics.model.ptr
    return Dynamics(
        low=np.array(np.broadcast_to(spec.minimum, spec.shape), np.float64, order="C"),
        high=np.array(np.broadcast_to(spec.maximum, spec.shape), np.float64, order="C"),
        sub_steps=int(environment._n_sub_steps),
        runge_kutta=bool(model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4.value),
        force_sensors=bool((model.sensor_needstage == mujoco.mjtStage.mjSTAGE_ACC.value).any()),
        all_sensors=bool(getattr(model, "nhistory", 0) or model.nplugin),
    )


def _pointer_to(kind: types.Type) -> Any:
    """A function for compiled code that turns an address into a pointer to `kind`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uintp), generate

    return pointer


_doubles, _int32s, _integers = _pointer_to(types.float64), _pointer_to(types.int32), _pointer_to(types.int64)


@cached
def _vector(row: Int64, at: int) -> Float64:
    """The field whose address stands at this place of the row."""
    return carray(_doubles(row[at]), (row[at + 1],))  # type: ignore[no-any-return]


@cached
def _matrix(row: Int64, at: int, columns: int) -> Float64:
    """The same for a field with columns."""
    return carray(_doubles(row[at]), (row[at + 1], columns))  # type: ignore[no-any-return]


@cached
def physics_at(row: Int64) -> Physics:
    """The world behind a row of addresses."""
    return Physics(
        qpos=_vector(row, _AT.qpos),
        qvel=_vector(row, _AT.qvel),
        act=_vector(row, _AT.act),
        ctrl=_vector(row, _AT.ctrl),
        sensordata=_vector(row, _AT.sensordata),
        xpos=_matrix(row, _AT.xpos, 3),
        xmat=_matrix(row, _AT.xmat, 9),
        xipos=_matrix(row, _AT.xipos, 3),
        geom_xpos=_matrix(row, _AT.geom_xpos, 3),
        geom_xmat=_matrix(row, _AT.geom_xmat, 9),
    )


ObserveAndReward = Callable[[int, int], float]


def observe_and_reward(
    observe: Callable[[Physics, Any, Float64], None],
    reward: Callable[[Physics, Any], float],
    constants: Any,
    obs_size: int,
) -> ObserveAndReward:
    """A task's `observe` and `reward` as one function of two addresses: a row, and an observation to fill.

    Its type is the same for all tasks, so that the loops below are compiled once for all of them.
    """

    @numba.cfunc(types.float64(types.uintp, types.uintp), error_model="numpy")  # type: ignore[untyped-decorator]
    def both(row: int, obs: int) -> float:
        physics = physics_at(carray(_integers(row), (ROW_SIZE,)))
        observe(physics, constants, carray(_doubles(obs), (obs_size,)))
        return reward(physics, constants)

    return cast(ObserveAndReward, both)


@cached
def _control_step(row: Int64, action: Float64, dynamics: Dynamics) -> bool:
    """Apply the clipped action for one control step, in dm_control's order; False if the physics became invalid.

    dm_control ends on the first half of a physics step, so that what it observes belongs to the new state. There the
    sensors of positions and velocities are computed, and in the last whole physics step those of forces and
    accelerations; before, sensors are switched off.
    """
    model, data, ctrl = row[_MODEL], row[_DATA], _vector(row, _AT.ctrl)
    for i in range(len(action)):
        ctrl[i] = min(max(action[i], dynamics.low[i]), dynamics.high[i]) if action[i] == action[i] else np.nan
    flags = carray(_int32s(row[_FLAGS]), (1,))
    flags_before = flags[0]
    if not dynamics.all_sensors:
        flags[0] |= _SENSORS_OFF
    for sub_step in range(dynamics.sub_steps):
        if sub_step == dynamics.sub_steps - 1 and dynamics.force_sensors:
            flags[0] = flags_before
        if sub_step == 0 and not dynamics.runge_kutta:
            _step2(model, data)
        else:
            _step(model, data)
    flags[0] = flags_before
    _step1(model, data)
    warnings = 0
    for i in range(_WARNINGS, _FIELDS):
        warnings += carray(_int32s(row[i]), (1,))[0]
    return warnings == 0


# --------------------------------------------------------------------------------------------------- policy


class Policies(NamedTuple):
    """K policies as the loops read them; see `pbrl.simulation.packing`."""

    layers: Float32  # [K, packed]: weights and bias of each layer in turn, outputs padded
    sizes: Int64  # widths of the layers
    relu: bool  # the hidden activation: ReLU or tanh
    squashed: bool  # whether actions are squashed, and the network's last outputs give their std
    std: Float32  # [K, act]; empty if squashed
    low_log_std: np.float32  # bounds of the log-std, if squashed
    high_log_std: np.float32
    centre: Float32  # [act] a squashed action is centre + scale * tanh(x)
    scale: Float32  # [act]


BLOCK = 4  # observations that share one pass over the weights
LANES = 8  # outputs of a layer are padded to a multiple of this
_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def padded(size: int) -> int:
    """The width at which a layer of `size` outputs is stored."""
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


@_fused
def _relu(x: Float32, columns: int) -> None:
    """ReLU in place."""
    for row in range(4):
        for j in range(columns):
            x[row, j] = max(x[row, j], np.float32(0))


@cached
def _forward(layers: Float32, sizes: Int64, relu: bool, block: Float32, spare: Float32) -> Float32:
    """The network's output for a block of four inputs. It works in both buffers and returns the one with the output."""
    offset = 0
    for layer in range(len(sizes) - 1):
        inputs, outputs = sizes[layer], (sizes[layer + 1] + LANES - 1) // LANES * LANES
        weights = layers[offset : offset + inputs * outputs].reshape(inputs, outputs)
        offset += inputs * outputs
        bias = layers[offset : offset + outputs]
        offset += outputs
        _affine(block, inputs, weights, bias, spare)
        if layer < len(sizes) - 2:
            if relu:
                _relu(spare, outputs)
            else:
                _tanh(spare, outputs)
        block, spare = spare, block
    return block


@cached
def _head_std(policies: Policies, output: Float32, std: Float32) -> None:
    """Fill the std [4, act] from the second half of the network's output, squashed to its bounds."""
    half = np.float32(0.5) * (policies.high_log_std - policies.low_log_std)
    act_size = std.shape[1]
    std[:] = output[:, act_size : 2 * act_size]
    _tanh(std, act_size)
    for row in range(BLOCK):
        for j in range(act_size):
            std[row, j] = np.exp(policies.low_log_std + half * (std[row, j] + np.float32(1)))


@cached
def _squash(policies: Policies, x: Float32, act_size: int) -> None:
    """x becomes centre + scale * tanh(x), in place; tanh stays below 1, so that the action has a density."""
    _tanh(x, act_size)
    for row in range(BLOCK):
        for j in range(act_size):
            y = min(max(x[row, j], -_BELOW_ONE), _BELOW_ONE)
            x[row, j] = policies.centre[j] + policies.scale[j] * y


@cached
def act(policies: Policies, policy: Int64, obs: Float32, noise: Float32, step: int, actions: Float32) -> None:
    """Fill the action [n, act] of each row under its own policy; rows of one policy are fastest side by side.

    policy: [n], which of the policies. obs: [n, obs]. noise: [n, T, act], of which `step` is used; empty for mean
    actions.
    """
    rows, act_size = actions.shape
    width = (policies.sizes.max() + LANES - 1) // LANES * LANES
    block, spare = np.zeros((BLOCK, width), np.float32), np.zeros((BLOCK, width), np.float32)
    std = np.empty((BLOCK, act_size), np.float32)
    begin = 0
    while begin < rows:
        end, which = begin, policy[begin]
        block[:] = 0
        while end < rows and end < begin + BLOCK and policy[end] == which:
            for j in range(obs.shape[1]):
                block[end - begin, j] = obs[end, j]
            end += 1
        output = _forward(policies.layers[which], policies.sizes, policies.relu, block, spare)
        if len(noise):
            if policies.squashed:
                _head_std(policies, output, std)
            else:
                std[:] = policies.std[which]
            for i in range(begin, end):
                for j in range(act_size):
                    output[i - begin, j] += std[i - begin, j] * noise[i, step, j]
        if policies.squashed:
            _squash(policies, output, act_size)
        for i in range(begin, end):
            for j in range(act_size):
                actions[i, j] = output[i - begin, j]
        begin = end


# --------------------------------------------------------------------------------------------------- loops


class Batch(NamedTuple):
    """n worlds of one task."""

    observe_and_reward: ObserveAndReward
    rows: Int64  # [n, ROW_SIZE] addresses
    dynamics: Dynamics


class Episodes(NamedTuple):
    """What n episodes of T control steps need, and the arrays to fill. Observations and actions may be empty."""

    policy: Int64  # [n] which of the policies acts
    noise: Float32  # [n, T, act]; empty for mean actions
    rewards: Float64  # [n, T], zero at first
    observations: Float32  # [n, T + 1, obs]
    actions: Float32  # [n, T, act]
    lengths: Int64  # [n], T at first
    diverged: Bool  # [n], False at first


@cached
def observe_all(worlds: Batch, obs: Float64) -> None:
    """Fill the observation [n, obs] of each world's present state."""
    for i in range(len(worlds.rows)):
        worlds.observe_and_reward(worlds.rows[i].ctypes.data, obs[i].ctypes.data)


@cached
def step_all(worlds: Batch, actions: Float64, obs: Float64, rewards: Float64, diverged: Bool) -> None:
    """One control step of each world that has not diverged: fills obs [n, obs], rewards [n], diverged [n]."""
    for i in range(len(worlds.rows)):
        rewards[i] = 0.0
        if not diverged[i]:
            diverged[i] = not _control_step(worlds.rows[i], actions[i], worlds.dynamics)
            if not diverged[i]:
                rewards[i] = worlds.observe_and_reward(worlds.rows[i].ctypes.data, obs[i].ctypes.data)


@cached
def run_episodes(worlds: Batch, policies: Policies, episodes: Episodes) -> None:
    """Whole episodes of n worlds in lockstep. A world that diverges keeps its last observation."""
    n, steps = episodes.rewards.shape
    obs_size, act_size = policies.sizes[0], len(worlds.dynamics.low)
    obs, obs32 = np.zeros((n, obs_size)), np.zeros((n, obs_size), np.float32)
    actions, action = np.zeros((n, act_size), np.float32), np.zeros(act_size)
    observe_all(worlds, obs)
    for t in range(steps + 1):
        for i in range(n):
            for j in range(obs_size):
                obs32[i, j] = obs[i, j]
                if len(episodes.observations):
                    episodes.observations[i, t, j] = obs32[i, j]
        if t == steps:
            break
        act(policies, episodes.policy, obs32, episodes.noise, t, actions)
        for i in range(n):
            if episodes.diverged[i]:
                continue
            for j in range(act_size):
                action[j] = actions[i, j]
                if len(episodes.actions):
                    episodes.actions[i, t, j] = actions[i, j]
            if _control_step(worlds.rows[i], action, worlds.dynamics):
                episodes.rewards[i, t] = worlds.observe_and_reward(worlds.rows[i].ctypes.data, obs[i].ctypes.data)
            else:
                episodes.diverged[i], episodes.lengths[i] = True, t
