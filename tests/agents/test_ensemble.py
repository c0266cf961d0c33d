"""The reward model as an ensemble on clips: against torch's own layers, how long it learns, and what it keeps."""

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import agents.reward_model
from agents.reward_model import orthogonal
from pbrl.threads import workers
from tests.agents.small_reward_model import differences_by_hand, random_pairs, reward_model
from tests.agents.toy import ACT, OBS, STEPS, TRAJECTORIES, behaviour, preferences

ENDS = np.r_[5, 0, np.full(TRAJECTORIES - 2, STEPS)]  # two trajectories end early


def fit(model):
    with workers() as pool:
        return model.fit(pool)


def weights_of(model):
    return np.concatenate([weights.detach().numpy().ravel() for weights in model.weights])


# Against torch's own layers


@pytest.mark.parametrize("steps", [4, None])
@pytest.mark.parametrize("output", ["tanh", "linear"])
def test_each_member_has_the_gradient_of_its_own_mean_loss(steps, output, rng):
    collected, q = behaviour(lengths=ENDS), rng.random(30)
    pairs, model = random_pairs(collected, 30, steps=steps), reward_model(output=output)
    expected, losses = [], []
    for member in model.members:
        D = differences_by_hand(member, collected, pairs)
        loss = binary_cross_entropy_with_logits(D, torch.from_numpy(q).float())
        expected += torch.autograd.grad(loss, list(member.parameters()))
        losses.append(float(loss.detach()))
    model.remember(collected, pairs, preferences(q))
    assert fit(model)["reward_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    for weights, gradient in zip(model.weights, expected, strict=True):
        torch.testing.assert_close(weights.grad, gradient, rtol=1e-3, atol=1e-5)


def test_what_it_says_of_pairs_and_of_steps():
    collected, model = behaviour(lengths=ENDS), reward_model()
    pairs = random_pairs(collected, 30, steps=4)
    with workers() as pool:
        differences, rewards = model.differences(collected, pairs, pool), model.reward(collected, pool)
    expected = [differences_by_hand(member, collected, pairs).detach().numpy() for member in model.members]
    np.testing.assert_allclose(differences, expected, atol=1e-5)
    inputs = torch.from_numpy(np.concatenate([collected.observations[:, :-1], collected.actions], -1))
    mean = torch.stack([member(inputs).squeeze(-1) for member in model.members]).mean(0).detach().numpy()
    np.testing.assert_allclose(rewards, np.where(np.arange(STEPS) < ENDS[:, None], mean, 0), atol=1e-5)


def test_pairs_are_taken_together_without_changing_the_gradient(monkeypatch, rng):
    """Groups of any size: the same to rounding."""
    collected, q = behaviour(), rng.random(30)
    gradients = []
    for rows in (1, 2 * 4 * 7, 10**6):
        monkeypatch.setattr(agents.reward_model, "_ROWS", rows)
        model = reward_model()
        model.remember(collected, random_pairs(collected, 30, steps=4), preferences(q))
        fit(model)
        gradients.append(np.concatenate([weights.grad.numpy().ravel() for weights in model.weights]))
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-5)
    np.testing.assert_allclose(gradients[0], gradients[2], atol=1e-5)


def test_one_member_on_whole_trajectories_is_the_papers_model_bit_for_bit(rng):
    """One pair at a time, batches drawn anew, gradients clipped: as it was before there were ensembles."""
    how = {"members": 1, "batch_pairs": 3, "gradient_steps": 4, "passes": None, "max_gradient_norm": 0.5}
    collected, q = behaviour(n=8, steps=1000), rng.random(5)
    pairs, model, again = random_pairs(collected, 5), reward_model(**how), reward_model(**how)
    model.remember(collected, pairs, preferences(q))
    fit(model)

    fresh = np.random.default_rng(0)
    orthogonal(again.layers[0], hidden_gain=2**0.5, output_gain=1.0, rng=fresh)
    adam = torch.optim.Adam(again.weights, lr=1e-2)
    clips = [
        (int(one) - 100, int(two) - 100)
        for one, two in zip(pairs.first.trajectory, pairs.second.trajectory, strict=True)
    ]
    inputs = torch.from_numpy(np.concatenate([collected.observations[:, :-1], collected.actions], axis=-1))
    for _ in range(4):
        looks = []
        for pair in fresh.permutation(5)[:3]:
            r = again._r(0, torch.cat([inputs[clip] for clip in clips[pair]]))
            first, second = torch.split(r, [1000, 1000])
            loss = binary_cross_entropy_with_logits(second.sum() - first.sum(), torch.tensor(q[pair]).float())
            looks.append(torch.autograd.grad(loss, again.weights))
        for weights, parts in zip(again.weights, zip(*looks, strict=True), strict=True):
            weights.grad = torch.stack(parts).mean(0)
        torch.nn.utils.clip_grad_norm_(again.weights, 0.5)
        adam.step()
    np.testing.assert_array_equal(weights_of(model), weights_of(again))


# How long it learns


def taught(q, *, pairs=20, **changes):
    """A model that has learnt from pairs of clips whose labels are q."""
    collected, model = behaviour(), reward_model(**changes)
    asked = random_pairs(collected, pairs, steps=4)
    with workers() as pool:
        D = model.differences(collected, asked, pool).mean(0)
    model.remember(collected, asked, preferences(q(D)))
    return fit(model)


def agreeing(D):
    """Labels as the members say, on average, before they learn."""
    return (D > 0).astype(float)


def test_a_pass_takes_all_pairs_and_there_are_as_many_as_set():
    assert taught(agreeing, passes=3, batch_pairs=20)["reward_steps"] == 3
    assert taught(agreeing, passes=3, batch_pairs=8)["reward_steps"] == 9  # 8 + 8 + 4 pairs


def test_steps_may_be_limited_beside_passes():
    assert taught(agreeing, passes=3, batch_pairs=8, gradient_steps=5)["reward_steps"] == 5
    assert taught(agreeing, passes=3, batch_pairs=8, gradient_steps=50)["reward_steps"] == 9


def test_it_ends_with_the_pass_that_is_accurate_enough():
    steps = taught(agreeing, passes=200, stop_at_accuracy=0.97)["reward_steps"]
    assert 1 < steps < 200
    assert taught(agreeing, passes=200, stop_at_accuracy=0.999)["reward_steps"] >= steps
    assert taught(agreeing, passes=3, stop_at_accuracy=1.0)["reward_steps"] == 3  # never exceeded


def test_the_accuracy_is_that_of_the_members_before_each_step():
    """One member that is right about all pairs needs one pass; one that is wrong about one of twenty goes on."""

    def one_wrong(D):
        q = agreeing(D)
        q[7] = 1 - q[7]
        return q

    assert taught(agreeing, members=1, passes=9, stop_at_accuracy=0.97)["reward_steps"] == 1
    slow = {"members": 1, "passes": 9, "learning_rate": 1e-9}
    assert taught(one_wrong, **slow, stop_at_accuracy=0.949)["reward_steps"] == 1
    assert taught(one_wrong, **slow, stop_at_accuracy=0.951)["reward_steps"] == 9


def test_pairs_that_the_teacher_calls_equal_do_not_count_towards_the_accuracy():
    def three_decided(D):
        return np.where(np.arange(len(D)) < 3, agreeing(D), 0.5)

    slow = {"members": 1, "passes": 9, "learning_rate": 1e-9, "stop_at_accuracy": 0.97}
    assert taught(three_decided, **slow)["reward_steps"] == 1
    assert taught(lambda D: np.full(len(D), 0.5), **slow)["reward_steps"] == 9


def test_every_member_sees_all_pairs_in_an_order_of_its_own():
    orders, model = [], reward_model(passes=2, batch_pairs=8)
    permutation = model.rng.permutation

    class Recorder:
        def permutation(self, n):
            orders.append(permutation(n))
            return orders[-1]

    model.rng = Recorder()
    collected = behaviour()
    model.remember(collected, random_pairs(collected, 20, steps=4), preferences(np.ones(20)))
    fit(model)
    assert len(orders) == 2 * 3
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == list(range(20)) for order in orders)


# What it keeps


def test_a_clip_is_kept_once_however_many_pairs_it_is_in():
    collected, model = behaviour(n=4), reward_model()
    model.remember(collected, random_pairs(collected, 50), preferences(np.ones(50)))
    assert model.buffer[0].inputs.shape == (4, STEPS, OBS + ACT)


def test_all_pairs_are_kept_and_skipped_ones_are_not_learnt_from():
    collected, answered = behaviour(), np.arange(20) % 3 > 0
    pairs = random_pairs(collected, 20, steps=4)
    one, two = reward_model(), reward_model()
    one.remember(collected, pairs, preferences(np.ones(20), answered))
    two.remember(collected, pairs, preferences(np.where(answered, 1.0, 0.0), answered))
    for _ in range(30):
        one.remember(collected, pairs, preferences(np.ones(20), np.zeros(20, bool)))
    assert len(one.buffer) == 31
    assert one.pairs == two.pairs == answered.sum()
    assert fit(one) == fit(two)
    np.testing.assert_array_equal(weights_of(one), weights_of(two))


def test_the_states_of_a_pair_in_one_row():
    collected, model = behaviour(), reward_model()
    pairs = random_pairs(collected, 20, steps=4)
    model.remember(collected, pairs, preferences(np.ones(20)))
    states = model.buffer[0].states(OBS).numpy()
    for pair in range(20):
        clips = [
            collected.observations[int(each.trajectory[pair]) - 100, int(each.step[pair]) :][:4]
            for each in (pairs.first, pairs.second)
        ]
        np.testing.assert_array_equal(states[pair], np.concatenate(clips).ravel())


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_and_any_interruption_gives_the_same_bits(threads):
    model, again = reward_model(passes=3, batch_pairs=8), reward_model(seed=5, passes=3, batch_pairs=8)
    collected = behaviour()

    def teach(each, seed):
        each.remember(collected, random_pairs(collected, 20, steps=4, seed=seed), preferences(np.ones(20)))
        return fit(each)

    teach(model, 1)
    again.load_state_dict(model.state_dict())
    again.rng.bit_generator.state = model.rng.bit_generator.state
    expected = teach(model, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert teach(again, 2) == expected
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(weights_of(model), weights_of(again))


def test_members_differ():
    first, second, third = reward_model().members
    assert not torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(second[0].weight, third[0].weight)


@pytest.mark.parametrize(
    "setting", ["members", "batch_pairs", "gradient_steps", "passes", "buffer_iterations", "learning_rate"]
)
def test_settings_that_make_no_sense_fail_by_name(setting):
    with pytest.raises(ValueError, match=setting):
        reward_model(**{setting: 0})


def test_it_must_be_said_how_long_it_learns():
    with pytest.raises(ValueError, match="gradient_steps or passes"):
        reward_model(passes=None)
