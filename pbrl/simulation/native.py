"""The simulator's inner loops: compiled, outside the GIL, calling libmujoco directly.

Numba compiles them, so no C++ compiler is needed. libmujoco is the library inside the `mujoco` wheel, the same one
that dm_control uses; its functions are found by name. A world (mjModel and mjData) is a row of addresses, and a task
sees it as a `Physics` of arrays.

The arithmetic of a trajectory does not depend on which others share its chunk: the policy sums over a layer's inputs
one after the other, for however many observations at a time. So results do not depend on chunks or threads, nor the
policy's on how wide the processor's vectors are.

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
from llvmlite import ir
from numba import carray, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from pbrl.compilation import with_sound_cache
from pbrl.types import Bool, Float32, Float64, Int64

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a task's function, anew in each process."""
    return cast(Function, numba.njit(nogil=True, error_model="numpy")(function))


def cached(function: Function) -> Function:
    """Compile and cache the result on disk, so that only the first use ever waits. For this file only."""
    return cast(Function, with_sound_cache(numba.njit(nogil=True, cache=True, error_model="numpy")(function)))


def is_cached() -> bool:
    """Whether the loops below were compiled before, so that the first collection need not wait for them."""
    return any((Path(__file__).parent / "__pycache__").glob("native.run_episodes-*.nbi"))


# --------------------------------------------------------------------------------------------------- MuJoCo


def _load_libmujoco() -> Any:
    """Make libmujoco's functions known by name to compiled code; the address of its callback that reads the clock."""
    folder = Path(mujoco.__file__).parent
    names = ("libmujoco.so", "libmujoco.", "mujoco.dll")
    libraries = [path for path in sorted(folder.iterdir()) if path.name.startswith(names)]
    if not libraries:
        raise ImportError(f"there is no libmujoco in {folder}: install the `mujoco` package from its wheel")
    llvmlite.binding.load_library_permanently(str(libraries[0]))
    return ctypes.c_void_p.in_dll(ctypes.CDLL(str(libraries[0])), "mjcb_time")


_read_clock = _load_libmujoco()
_package_clock = _read_clock.value


def time_physics(on: bool) -> None:
    """Start or stop MuJoCo's timers, `MjData.timer`.

    With them, as its Python package has it, MuJoCo reads the clock several times in every physics step: a tenth of the
    time of small models. So they are stopped here. `mujoco.set_mjcb_time` sets a clock of one's own.
    """
    _read_clock.value = _package_clock if on else None


time_physics(False)
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


@cached
def fill(obs: Float64, at: int, values: Float64) -> int:
    """Write values from a place of an observation on; the place after them.

    In place of `obs[at:end] = values`, whose error message alone takes each process seconds to compile.
    """
    for i in range(len(values)):
        obs[at + i] = values[i]
    return at + len(values)


@intrinsic  # type: ignore[untyped-decorator]
def _observe_and_reward_at(typing_context: Any, address: Any, row: Any, obs: Any) -> Any:  # noqa: ARG001
    """Call the function at an address: see `observe_and_reward`. A function itself takes 100 us to pass to a loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        kind = ir.FunctionType(ir.DoubleType(), [ir.IntType(64)] * 2)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.float64(types.uintp, types.uintp, types.uintp), generate


def observe_and_reward(
    observe: Callable[[Physics, Any, Float64], None],
    reward: Callable[[Physics, Any], float],
    constants: Any,
    obs_size: int,
) -> Any:
    """A task's `observe` and `reward` as one function of two addresses: a row, and an observation to fill.

    Loops take its `address`, valid for as long as the function lives, so that they are compiled once for all tasks.
    """

    @numba.cfunc(types.float64(types.uintp, types.uintp), error_model="numpy")  # type: ignore[untyped-decorator]
    def both(row: int, obs: int) -> float:
        physics = physics_at(carray(_integers(row), (ROW_SIZE,)))
        observe(physics, constants, carray(_doubles(obs), (obs_size,)))
        return reward(physics, constants)

    return both


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
    """K policies as the loops read them; see `pbrl.simulation.packing`.

    Either each has its layers, or all have the same and each its own changes of low rank.
    """

    layers: Float32  # [K or 1, packed] for each layer its panels in turn: the bias [LANES], the weights [inputs, LANES]
    ranks: Int64  # [layers] of the changes; empty if there are none
    changes: Float32  # [K, packed] for each layer, padded: of the bias, then `rank` times [inputs] and [outputs]
    sizes: Int64  # widths of the layers
    relu: bool  # the hidden activation: ReLU or tanh
    squashed: bool  # whether actions are squashed, and the network's last outputs give their std
    std: Float32  # [K, act]; empty if squashed
    low_log_std: np.float32  # bounds of the log-std, if squashed
    high_log_std: np.float32
    centre: Float32  # [act] a squashed action is centre + scale * tanh(x)
    scale: Float32  # [act]


LANES = 16  # outputs of a layer that are computed together, a panel; their number is padded to a multiple of this
ROWS = 4  # observations at a time: their sums fit in the processor's registers, and weights are read once for all
_NUMBER, _INDEX, _VECTOR = ir.FloatType(), ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def padded(size: int) -> int:
    """The width at which a layer of `size` outputs is stored."""
    return -(-size // LANES) * LANES


@intrinsic  # type: ignore[untyped-decorator]
def _fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
    """a * b + c, rounded once: the same bits on every processor, however wide its vectors are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _vector_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """The same of vectors."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


def _vector_at(builder: Any, start: Any, offset: Any) -> Any:
    """The address of the vector that begins so many numbers after another address."""
    return builder.bitcast(builder.gep(start, [offset]), _VECTOR.as_pointer())


def _sums(rows: int, panels: int) -> Any:
    """A function for compiled code: outputs [rows, panels * LANES] for inputs [rows, inputs] and neighbouring panels.

    Every sum begins with the bias and adds the inputs in turn, in registers from first to last.
    """
    all_the_same = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        x, x_size, n, w, w_size, y, y_size = arguments
        x, w, y = (builder.inttoptr(address, _NUMBER.as_pointer()) for address in (x, w, y))
        x_rows = [builder.gep(x, [builder.mul(x_size, _INDEX(row))]) for row in range(rows)]
        y_rows = [builder.gep(y, [builder.mul(y_size, _INDEX(row))]) for row in range(rows)]
        starts = [builder.gep(w, [builder.mul(w_size, _INDEX(panel))]) for panel in range(panels)]
        biases = [builder.load(_vector_at(builder, start, _INDEX(0)), align=4) for start in starts]

        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INDEX)
        totals = [[builder.phi(_VECTOR) for _ in starts] for _ in x_rows]
        next_k = builder.add(k, _INDEX(1))
        weights = [
            builder.load(_vector_at(builder, start, builder.mul(next_k, _INDEX(LANES))), align=4) for start in starts
        ]
        sums = []
        for x_row, row_totals in zip(x_rows, totals, strict=True):
            value = builder.load(builder.gep(x_row, [k]))
            value = builder.insert_element(_VECTOR(ir.Undefined), value, _INDEX(0))
            value = builder.shuffle_vector(value, _VECTOR(ir.Undefined), all_the_same)
            sums.append([_vector_fma(builder, value, *each) for each in zip(weights, row_totals, strict=True)])
        k.add_incoming(_INDEX(0), before)
        k.add_incoming(next_k, loop)
        for row_totals, row_sums in zip(totals, sums, strict=True):
            for total, bias, more in zip(row_totals, biases, row_sums, strict=True):
                total.add_incoming(bias, before)
                total.add_incoming(more, loop)
        builder.cbranch(builder.icmp_unsigned("<", next_k, n), loop, after)

        builder.position_at_end(after)
        for y_row, row_sums in zip(y_rows, sums, strict=True):
            for panel, total in enumerate(row_sums):
                builder.store(total, _vector_at(builder, y_row, _INDEX(panel * LANES)), align=4)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def sums(typing: Any, x: Any, x_size: Any, n: Any, w: Any, w_size: Any, y: Any, y_size: Any) -> Any:  # noqa: ARG001
        """Addresses of n inputs x, panels w and outputs y; how far it is from each row or panel to the next."""
        return types.void(*[types.uintp] * 7), generate

    return sums


_sums_of_rows, _sums_of_one_row, _last_sums_of_one_row = _sums(ROWS, 1), _sums(1, 2), _sums(1, 1)


@cached
def _affine(x: Float32, rows: int, inputs: int, layer: Float32, out: Float32, outputs: int) -> None:
    """out = x weights + bias for the first row, or for all ROWS of them."""
    x_size, out_size, panel_size = x.shape[1], out.shape[1], (inputs + 1) * LANES
    panel, panels = 0, outputs // LANES
    while panel < panels:
        weights, to = layer[panel * panel_size :].ctypes.data, out[0, panel * LANES :].ctypes.data
        if rows > 1:
            _sums_of_rows(x.ctypes.data, x_size, inputs, weights, panel_size, to, out_size)
            panel += 1
        elif panel + 1 < panels:
            _sums_of_one_row(x.ctypes.data, x_size, inputs, weights, panel_size, to, out_size)
            panel += 2
        else:
            _last_sums_of_one_row(x.ctypes.data, x_size, inputs, weights, panel_size, to, out_size)
            panel += 1


@intrinsic  # type: ignore[untyped-decorator]
def _dot(typing_context: Any, x: Any, y: Any, n: Any) -> Any:  # noqa: ARG001
    """The sum of x * y over n numbers, a multiple of LANES, at two addresses: of each lane, then of their halves."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        x, y = (builder.inttoptr(address, _NUMBER.as_pointer()) for address in arguments[:2])
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        k, total = builder.phi(_INDEX), builder.phi(_VECTOR)
        next_k = builder.add(k, _INDEX(LANES))
        x_now, y_now = (builder.load(_vector_at(builder, start, k), align=4) for start in (x, y))
        more = _vector_fma(builder, x_now, y_now, total)
        for now, first, then in ((k, _INDEX(0), next_k), (total, _VECTOR([0.0] * LANES), more)):
            now.add_incoming(first, before)
            now.add_incoming(then, loop)
        builder.cbranch(builder.icmp_unsigned("<", next_k, arguments[2]), loop, after)

        builder.position_at_end(after)
        sums = [builder.extract_element(more, _INDEX(lane)) for lane in range(LANES)]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [builder.fadd(*each) for each in zip(sums[:half], sums[half:], strict=True)]
        return sums[0]

    return types.float32(types.uintp, types.uintp, types.uintp), generate


@cached
def _change(x: Float32, inputs: int, change: Float32, rank: int, out: Float32, outputs: int) -> None:
    """out += (x U) V + bias for one row, with a change of U [inputs, rank], V [rank, outputs] and bias."""
    for j in range(outputs):
        out[j] += change[j]
    offset = outputs
    for _ in range(rank):
        along = _dot(x.ctypes.data, change[offset:].ctypes.data, inputs)
        v = change[offset + inputs : offset + inputs + outputs]
        offset += inputs + outputs
        for j in range(outputs):
            out[j] = _fma(along, v[j], out[j])


@cached
def _tanh(x: Float32, rows: int, columns: int) -> None:
    """tanh in place: a rational approximation, within 4e-7 of the true value, that compiles to vector code."""
    for row in range(rows):
        for j in range(columns):
            y = min(max(x[row, j], np.float32(-7.9053111)), np.float32(7.9053111))
            y2 = y * y
            p = np.float32(-2.76076847742355e-16)
            p = _fma(p, y2, np.float32(2.00018790482477e-13))
            p = _fma(p, y2, np.float32(-8.60467152213735e-11))
            p = _fma(p, y2, np.float32(5.12229709037114e-08))
            p = _fma(p, y2, np.float32(1.48572235717979e-05))
            p = _fma(p, y2, np.float32(6.37261928875436e-04))
            p = _fma(p, y2, np.float32(4.89352455891786e-03))
            q = np.float32(1.19825839466702e-06)
            q = _fma(q, y2, np.float32(1.18534705686654e-04))
            q = _fma(q, y2, np.float32(2.26843463243900e-03))
            q = _fma(q, y2, np.float32(4.89352518554385e-03))
            x[row, j] = y * p / q


@cached
def _relu(x: Float32, rows: int, columns: int) -> None:
    """ReLU in place."""
    for row in range(rows):
        for j in range(columns):
            x[row, j] = max(x[row, j], np.float32(0))


@cached
def _forward(policies: Policies, policy: Int64, x: Float32, spare: Float32) -> Float32:
    """The network's output for some rows of inputs, which have one policy or policies that share their layers.

    It works in both buffers and returns the one with the output.
    """
    rows, sizes = len(policy), policies.sizes
    layers = policies.layers[policy[0] if len(policies.ranks) == 0 else 0]
    offset, change_offset = 0, 0
    for layer in range(len(sizes) - 1):
        inputs, outputs = sizes[layer], (sizes[layer + 1] + LANES - 1) // LANES * LANES
        _affine(x, rows, inputs, layers[offset:], spare, outputs)
        offset += (inputs + 1) * outputs
        if len(policies.ranks):
            rank, inputs = policies.ranks[layer], (inputs + LANES - 1) // LANES * LANES
            for row in range(rows):
                _change(x[row], inputs, policies.changes[policy[row], change_offset:], rank, spare[row], outputs)
            change_offset += outputs + rank * (inputs + outputs)
        if layer < len(sizes) - 2:
            if policies.relu:
                _relu(spare, rows, outputs)
            else:
                _tanh(spare, rows, outputs)
        x, spare = spare, x
    return x


@cached
def _head_std(policies: Policies, output: Float32, std: Float32, rows: int) -> None:
    """Fill the std [rows, act] from the second half of the network's output, squashed to its bounds."""
    half = np.float32(0.5) * (policies.high_log_std - policies.low_log_std)
    act_size = std.shape[1]
    std[:rows] = output[:rows, act_size : 2 * act_size]
    _tanh(std, rows, act_size)
    for row in range(rows):
        for j in range(act_size):
            std[row, j] = np.exp(policies.low_log_std + half * (std[row, j] + np.float32(1)))


@cached
def _squash(policies: Policies, x: Float32, rows: int, act_size: int) -> None:
    """x becomes centre + scale * tanh(x), in place; tanh stays below 1, so that the action has a density."""
    _tanh(x, rows, act_size)
    for row in range(rows):
        for j in range(act_size):
            y = min(max(x[row, j], -_BELOW_ONE), _BELOW_ONE)
            x[row, j] = policies.centre[j] + policies.scale[j] * y


@cached
def act(policies: Policies, policy: Int64, obs: Float32, noise: Float32, step: int, actions: Float32) -> None:
    """Fill the action [n, act] of each row under its own policy; rows of one policy are fastest side by side.

    policy: [n], which of the policies. obs: [n, obs]. noise: [n, T, act], of which `step` is used; empty for mean
    actions.
    """
    n, act_size = actions.shape
    width = (policies.sizes.max() + LANES - 1) // LANES * LANES
    x, spare = np.zeros((ROWS, width), np.float32), np.empty((ROWS, width), np.float32)
    std = np.empty((ROWS, act_size), np.float32)
    begin = 0
    while begin < n:
        end = begin + 1
        while end < min(n, begin + ROWS) and (len(policies.ranks) or policy[end] == policy[begin]):
            end += 1
        rows = end - begin
        x[:] = 0
        for i in range(rows):
            for j in range(obs.shape[1]):
                x[i, j] = obs[begin + i, j]
        output = _forward(policies, policy[begin:end], x, spare)
        if len(noise):
            if policies.squashed:
                _head_std(policies, output, std, rows)
            else:
                for i in range(rows):
                    std[i] = policies.std[policy[begin + i]]
            for i in range(rows):
                for j in range(act_size):
                    output[i, j] += std[i, j] * noise[begin + i, step, j]
        if policies.squashed:
            _squash(policies, output, rows, act_size)
        for i in range(rows):
            for j in range(act_size):
                actions[begin + i, j] = output[i, j]
        begin = end


# --------------------------------------------------------------------------------------------------- loops


class Batch(NamedTuple):
    """n worlds of one task."""

    observe_and_reward: int  # the task's function, by its address
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
        _observe_and_reward_at(worlds.observe_and_reward, worlds.rows[i].ctypes.data, obs[i].ctypes.data)


@cached
def step_all(worlds: Batch, actions: Float64, obs: Float64, rewards: Float64, diverged: Bool) -> None:
    """One control step of each world that has not diverged: fills obs [n, obs], rewards [n], diverged [n]."""
    for i in range(len(worlds.rows)):
        rewards[i] = 0.0
        if not diverged[i]:
            diverged[i] = not _control_step(worlds.rows[i], actions[i], worlds.dynamics)
            if not diverged[i]:
                row = worlds.rows[i].ctypes.data
                rewards[i] = _observe_and_reward_at(worlds.observe_and_reward, row, obs[i].ctypes.data)


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
                row = worlds.rows[i].ctypes.data
                episodes.rewards[i, t] = _observe_and_reward_at(worlds.observe_and_reward, row, obs[i].ctypes.data)
            else:
                episodes.diverged[i], episodes.lengths[i] = True, t
