"""A reward learnt from preferences between clips or whole trajectories, by one network or an ensemble of them.

Christiano et al. 2017, "Deep Reinforcement Learning from Human Preferences", with soft labels:

    remember the answered pairs
    for each member: Adam steps on batches of them, minimising the mean of
        L = -[ q log sig(D) + (1 - q) log sig(-D) ],    D = sum_t r(s_t, a_t) of the second - that of the first
    r <- the mean of the members

    q  the teacher's probability that the second is better        r  a network

There are two ways to go through the pairs. With `passes: null`, as in the paper that this benchmark is from, each of
`gradient_steps` is on a batch drawn anew. With `passes`, as in B-Pref (Lee et al. 2021, "B-Pref: Benchmarking
Preference-Based Reinforcement Learning"), each pass takes all pairs in an order of each member's own, and a pass in
which the members order enough of the pairs as the teacher does is the last; `gradient_steps` may end it earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pbrl.network import mlp, segment_sums
from pbrl.types import Behaviour, Clips, Fixed, Float32, Metrics, Pairs, Preferences

Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # first and second [steps, obs + act], and q
_ROWS = 2000  # that a thread takes at a time: a pair of whole trajectories, or a number of clips


def linear_layers(*networks: nn.Module) -> list[nn.Linear]:
    """Those of the networks, in order."""
    return [layer for network in networks for layer in network.modules() if isinstance(layer, nn.Linear)]


def orthogonal(
    layers: Sequence[nn.Linear], *, hidden_gain: float, output_gain: float, rng: np.random.Generator
) -> None:
    """Give the layers orthogonal weights, the last of them with its own gain, and zero biases."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
    for layer in layers:
        nn.init.orthogonal_(layer.weight, output_gain if layer is layers[-1] else hidden_gain, generator)
        nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class Comparisons:
    """The pairs of one round of questions. A clip that is in several of them is kept once."""

    inputs: torch.Tensor  # [K, H, obs + act] of the clips
    lengths: torch.Tensor  # [K] steps until the end of each
    first: torch.Tensor  # [P] which of the clips
    second: torch.Tensor  # [P]
    q: torch.Tensor  # [P]
    answered: torch.Tensor  # [P] whether the teacher did not skip it

    def pairs(self) -> list[Pair]:
        """Those that were answered, each clip as far as it was lived."""
        clips = [clip[:end] for clip, end in zip(self.inputs, self.lengths.tolist(), strict=True)]
        columns = (each[self.answered].tolist() for each in (self.first, self.second))
        chosen = zip(*columns, self.q[self.answered], strict=True)
        return [(clips[first], clips[second], q) for first, second, q in chosen]

    def states(self, obs_size: int) -> torch.Tensor:
        """The observations of both clips of each pair, in one row [P, 2 H obs]."""
        states = self.inputs[..., :obs_size].flatten(1)
        return torch.cat([states[self.first], states[self.second]], dim=1)


class RewardModel:
    """r(s, a), and the comparisons that it learns from."""

    def __init__(
        self,
        *,
        obs_size: int,
        act_size: int,
        rng: np.random.Generator,
        members: int,
        hidden: Sequence[int],
        hidden_gain: float,
        output_gain: float,
        output: Literal["linear", "tanh"],
        learning_rate: float,
        batch_pairs: int,
        gradient_steps: int | None,
        passes: int | None,
        stop_at_accuracy: float | None,
        max_gradient_norm: float | None,
        buffer_iterations: int | None,
    ) -> None:
        for name, number in (("learning_rate", learning_rate), ("max_gradient_norm", max_gradient_norm)):
            if number is not None and number <= 0:
                raise ValueError(f"{name} must be positive, not {number}")
        for name, count in (
            ("members", members),
            ("batch_pairs", batch_pairs),
            ("gradient_steps", gradient_steps),
            ("passes", passes),
            ("buffer_iterations", buffer_iterations),
        ):
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        if gradient_steps is None and passes is None:
            raise ValueError("gradient_steps or passes must say how long the reward model learns: both are null")
        self.rng, self.batch_pairs, self.output, self.obs_size = rng, batch_pairs, output, obs_size
        self.gradient_steps, self.passes, self.stop_at_accuracy = gradient_steps, passes, stop_at_accuracy
        self.max_gradient_norm = max_gradient_norm
        sizes = [obs_size + act_size, *hidden, 1]
        self.members = [_network(sizes, output) for _ in range(members)]
        self.layers = [linear_layers(member) for member in self.members]
        for layers in self.layers:
            orthogonal(layers, hidden_gain=hidden_gain, output_gain=output_gain, rng=rng)
        self.weights = [weights for member in self.members for weights in member.parameters()]
        self.adam = torch.optim.Adam(self.weights, lr=learning_rate)
        self.buffer: deque[Comparisons] = deque(maxlen=buffer_iterations)

    @property
    def pairs(self) -> int:
        """How many answered pairs are remembered."""
        return sum(int(each.answered.sum()) for each in self.buffer)

    # What it says

    def _layers(self, member: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A member's weights [inputs, outputs] and biases."""
        return [(layer.weight.T, layer.bias) for layer in self.layers[member]]

    def _r(self, member: int, inputs: torch.Tensor) -> torch.Tensor:
        """A member's r(s, a) [n] of inputs [n, obs + act]; differentiable in the weights."""
        r = mlp(inputs, self._layers(member), "leaky_relu").squeeze(-1)
        return torch.tanh(r) if self.output == "tanh" else r

    def reward(self, behaviour: Behaviour, pool: Executor) -> Float32:
        """r(s_t, a_t) [N, T], the mean of the members; 0 after a trajectory's end."""
        assert behaviour.observations is not None
        assert behaviour.actions is not None
        obs, actions = behaviour.observations, behaviour.actions
        rewards = np.zeros(actions.shape[:2], np.float32)

        def fill(row: int, end: int) -> None:
            inputs = torch.from_numpy(np.concatenate([obs[row, :end], actions[row, :end]], axis=-1))
            with torch.no_grad():
                r = torch.stack([self._r(member, inputs) for member in range(len(self.members))])
                rewards[row, :end] = r.mean(0)

        list(pool.map(fill, range(len(rewards)), behaviour.lengths))
        return rewards

    def differences(self, behaviour: Behaviour, pairs: Pairs, pool: Executor) -> Float32:
        """D of each member and pair [members, P]: how much more it would reward the second."""
        inputs, lengths, first, second = _distinct_clips(behaviour, pairs)
        clips = [clip[:end] for clip, end in zip(inputs, lengths.tolist(), strict=True)]
        groups = _groups(clips, max(1, _ROWS // inputs.shape[1]))

        def sums(job: tuple[int, list[torch.Tensor]]) -> torch.Tensor:
            with torch.no_grad():
                return self._sums(*job)

        jobs = [(member, group) for member in range(len(self.members)) for group in groups]
        returns = torch.cat(list(pool.map(sums, jobs))).view(len(self.members), -1)
        return (returns[:, second] - returns[:, first]).numpy()

    def accuracy(self, behaviour: Behaviour, pairs: Pairs, preferences: Preferences, pool: Executor) -> Metrics:
        """In how many of the decided pairs the learnt reward has the teacher's order."""
        q = preferences.probability
        decided = preferences.answered & (q != 0.5)
        D = self.differences(behaviour, pairs, pool).mean(axis=0)
        agreed = (D > 0) == (q > 0.5)
        return {"reward_accuracy": float(agreed[decided].mean())} if decided.any() else {}

    def _sums(self, member: int, clips: Sequence[torch.Tensor]) -> torch.Tensor:
        """A member's sum of rewards of each clip [len(clips)]; differentiable in the weights."""
        inputs, lengths = torch.cat(list(clips)), [len(clip) for clip in clips]
        if self.output == "linear":
            return segment_sums(inputs, lengths, self._layers(member), "leaky_relu")
        return torch.stack([part.sum() for part in torch.split(self._r(member, inputs), lengths)])

    # How it learns

    def remember(self, behaviour: Behaviour, pairs: Pairs, preferences: Preferences) -> None:
        """Add the pairs of a round of questions; the oldest round is forgotten when the buffer is full."""
        inputs, lengths, first, second = _distinct_clips(behaviour, pairs)
        q, answered = torch.from_numpy(preferences.probability).float(), torch.from_numpy(preferences.answered)
        self.buffer.append(Comparisons(inputs, lengths, first, second, q, answered))

    def fit(self, pool: Executor) -> Metrics:
        """Learn from what is remembered. The metrics are those of the last Adam step, and none if there is nothing."""
        known = [pair for each in self.buffer for pair in each.pairs()]
        if not known:
            return {}
        batches = -(-len(known) // self.batch_pairs) if self.passes else 1  # of a pass
        most = min(limit for limit in (self.gradient_steps, self.passes and self.passes * batches) if limit)
        for step in range(most):
            batch = step % batches
            if batch == 0:
                orders = [self.rng.permutation(len(known)) for _ in self.members]
                right = decided = 0
            rows = slice(batch * self.batch_pairs, (batch + 1) * self.batch_pairs)
            metrics, D, q = self._adam_step([[known[pair] for pair in order[rows]] for order in orders], pool)
            right += int((((D > 0) == (q > 0.5)) & (q != 0.5)).sum())
            decided += int((q != 0.5).sum())  # Departure: in B-Pref pairs that the teacher calls equal count, too
            last_of_pass = batch == batches - 1
            if last_of_pass and self.stop_at_accuracy is not None and right > self.stop_at_accuracy * decided:
                break
        return {**metrics, "reward_steps": float(step + 1)}

    def _adam_step(
        self, batches: Sequence[Sequence[Pair]], pool: Executor
    ) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
        """One step of every member on its batch; the metrics, and D and q of all members' pairs before the step."""

        def look_at(job: tuple[int, Sequence[Pair]]) -> tuple[torch.Tensor, ...]:
            """D and q of some pairs, the sum of their losses, and the gradient of it."""
            member, group = job
            first, second = self._sums(member, [clip for *clips, _ in group for clip in clips]).view(-1, 2).T
            D, q = second - first, torch.stack([q for *_, q in group])
            L = binary_cross_entropy_with_logits(D, q, reduction="sum")
            return D.detach(), q, L.detach(), *torch.autograd.grad(L, list(self.members[member].parameters()))

        longest = max(len(clip) for *clips, _ in batches[0] for clip in clips)
        group_size = max(1, _ROWS // max(1, 2 * longest))
        jobs = [(member, group) for member, batch in enumerate(batches) for group in _groups(batch, group_size)]
        looks = list(pool.map(look_at, jobs))
        losses = []
        for member, network in enumerate(self.members):
            mine = zip(*(look[2:] for (who, _), look in zip(jobs, looks, strict=True) if who == member), strict=True)
            loss, *gradient = (torch.stack(each).sum(0) / len(batches[member]) for each in mine)
            losses.append(float(loss))
            for weights, part in zip(network.parameters(), gradient, strict=True):
                weights.grad = part
        gradient_norm = nn.utils.clip_grad_norm_(self.weights, self.max_gradient_norm or float("inf"))
        self.adam.step()
        metrics = {"reward_loss": float(np.mean(losses)), "reward_gradient_norm": float(gradient_norm)}
        return metrics, torch.cat([look[0] for look in looks]), torch.cat([look[1] for look in looks])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly, but for the generator, which is its owner's."""
        return {
            "members": [deepcopy(dict(member.state_dict())) for member in self.members],
            "adam": deepcopy(self.adam.state_dict()),
            "buffer": [Fixed(vars(each)) for each in self.buffer],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for member, weights in zip(self.members, state["members"], strict=True):
            member.load_state_dict(weights)
        self.adam.load_state_dict(deepcopy(state["adam"]))
        self.buffer = deque((Comparisons(**each) for each in state["buffer"]), maxlen=self.buffer.maxlen)


def _network(sizes: Sequence[int], output: Literal["linear", "tanh"]) -> nn.Sequential:
    """One member: leaky ReLU inside."""
    layers: list[nn.Module] = [
        part for n, m in pairwise(sizes) for part in (nn.Linear(n, m), nn.LeakyReLU(inplace=True))
    ]
    layers[-1] = nn.Tanh() if output == "tanh" else nn.Identity()
    return nn.Sequential(*layers)


def _distinct_clips(behaviour: Behaviour, pairs: Pairs) -> tuple[torch.Tensor, ...]:
    """(s_t, a_t) of each clip that the pairs name [K, H, obs + act], its steps [K], and the pairs' clips [P] each."""
    named = [
        np.concatenate([getattr(clips, name) for clips in (pairs.first, pairs.second)])
        for name in ("trajectory", "step")
    ]
    (trajectory, step), rows = np.unique(np.stack(named), axis=1, return_inverse=True)
    obs, actions, lived = behaviour.cut(Clips(trajectory=trajectory, step=step), pairs.steps)
    inputs = np.concatenate([obs, actions], axis=-1)
    first, second = rows.reshape(2, -1)
    return tuple(torch.from_numpy(each) for each in (inputs, lived, first, second))


def _groups(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The items in groups of that size, the last of which may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]
