from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nesa_node.core.errors import ConfigError, MissingBlocksError
from nesa_node.routing.chain_request import (
    ChainProblem,
    CostWeights,
    Visit,
    apply_weights,
    check_chain,
    step_time,
)
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.greedy import (
    SHIPPED_PARAMETERS,
    GreedyInputs,
    GreedyParameters,
    GreedyRule,
    shift_boundaries,
)
from nesa_node.routing.strategies import (
    STRATEGIES,
    GreedyStrategy,
    LatencyStrategy,
    PrintedRule,
    explain,
    make_session_strategy,
    make_strategy,
    reads_stability,
)
from tests.routing.problems import count_calls, covered_problem, random_problem, small_problem


def _total_s(problem: ChainProblem, name: str) -> float:
    strategy = make_strategy(name, np.random.default_rng(0))
    return step_time(problem, strategy.choose(problem)).total_s


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_gives_chains_that_fit_and_names_what_is_missing(name: str) -> None:
    strategy = make_strategy(name, np.random.default_rng(0))
    assert strategy.name == name
    missing = []
    for seed in range(60):
        problem = small_problem(seed)
        if not np.isfinite(problem.transfer_s_NN).all():
            continue
        try:
            chain = strategy.choose(problem)
        except MissingBlocksError as error:
            missing.append(error.missing)
            continue
        check_chain(problem, chain)
        assert len({visit.node for visit in chain}) == len(chain)
        assert (
            step_time(problem, chain).total_s
            >= step_time(problem, exact_latency(problem)).total_s - 1e-9
        )
        assert all(term >= 0.0 for term in strategy.terms(problem, chain).values())
    assert missing
    assert all(missing)


@pytest.mark.parametrize("name", STRATEGIES)
def test_hostile_problems_are_survived(name: str) -> None:
    strategy = make_strategy(name, np.random.default_rng(0))
    nobody = random_problem(np.random.default_rng(0), 0, 4)
    with pytest.raises(MissingBlocksError):
        strategy.choose(nobody)
    problem = covered_problem(np.random.default_rng(1), 12, 8)
    overloaded = replace(
        problem,
        load_N=np.full(12, 1e12),
        spare_N=np.zeros(12),
        reliability_N=np.zeros(12),
        stability_N=np.zeros(12),
    )
    check_chain(overloaded, strategy.choose(overloaded))
    instant = replace(
        problem,
        block_s_N=np.zeros(12),
        visit_s_N=np.zeros(12),
        entry_s_N=np.zeros(12),
        exit_s_N=np.zeros(12),
        transfer_s_NN=np.zeros((12, 12)),
    )
    check_chain(instant, strategy.choose(instant))


def test_unknown_strategy_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="homology-greedy"):
        make_strategy("best", np.random.default_rng(0))


def test_petals_leaves_nodes_only_at_their_ends() -> None:
    problem = covered_problem(np.random.default_rng(2), 40, 20)
    chain = make_strategy("petals", np.random.default_rng(0)).choose(problem)
    assert all(problem.ends_N[visit.node] == visit.end for visit in chain)
    assert _total_s(problem, "exact-latency") <= _total_s(problem, "petals")
    assert _total_s(problem, "petals") <= _total_s(problem, "random")


def _twins(**arrays: list[float]) -> ChainProblem:
    """Two nodes that differ in nothing but `arrays`."""
    problem = random_problem(np.random.default_rng(0), 2, 4)
    same = replace(
        problem,
        starts_N=np.zeros(2, dtype=np.int64),
        ends_N=np.full(2, 4),
        block_s_N=np.full(2, 0.01),
        visit_s_N=np.zeros(2),
        load_N=np.full(2, 0.2),
        spare_N=np.full(2, 0.5),
        cache_N=np.full(2, 0.5),
        pressure_N=np.zeros(2),
        reliability_N=np.full(2, 0.9),
        stability_N=np.ones(2),
        entry_s_N=np.full(2, 0.01),
        exit_s_N=np.full(2, 0.01),
        transfer_s_NN=np.full((2, 2), 0.01),
    )
    for name, values in arrays.items():
        getattr(same, name)[:] = values
    return same


@pytest.mark.parametrize(
    ("arrays", "greedy", "literal"),
    [
        ({"load_N": [0.9, 0.1]}, 1, 0),
        ({"reliability_N": [0.5, 0.99]}, 1, 0),
    ],
)
def test_greedy_prefers_what_the_printed_rule_avoids(
    arrays: dict[str, list[float]], greedy: int, literal: int
) -> None:
    problem = _twins(**arrays)
    rng = np.random.default_rng(0)
    assert make_strategy("homology-greedy", rng).choose(problem)[0].node == greedy
    assert make_strategy("paper-literal", rng).choose(problem)[0].node == literal


def test_greedy_with_the_ratio_prefers_the_idle_node() -> None:
    prepared = GreedyInputs.from_problem(_twins(load_N=[0.9, 0.1]))
    assert GreedyRule(prepared, GreedyParameters(load="ratio")).choose()[0].node == 1


def test_ratio_has_the_larger_of_load_and_memory_pressure_over_free_memory() -> None:
    """0.6 / 0.5 and 0.4 / 0.25 by hand: the busier machine has more free accelerator memory."""
    twins = _twins(load_N=[0.6, 0.1], pressure_N=[0.2, 0.4], spare_N=[0.5, 0.25])
    prepared = GreedyInputs.from_problem(twins)
    assert prepared.ratio_N == pytest.approx([1.2, 1.6])
    assert GreedyRule(prepared, GreedyParameters(load="ratio")).choose()[0].node == 0


@pytest.mark.parametrize("printed_beta", [0.5, 2.0])
def test_printed_rule_reads_pressure_where_it_exceeds_the_load(printed_beta: float) -> None:
    twins = _twins(load_N=[0.2, 0.2], pressure_N=[0.8, 0.0], spare_N=[0.4, 0.4])
    rule = PrintedRule(beta=printed_beta)
    loads = [rule.terms(twins, (Visit(node, 0, 4),))["load"] for node in (0, 1)]
    assert loads == pytest.approx([0.5**printed_beta, 2.0**printed_beta])


@pytest.mark.parametrize(
    ("weight", "array"), [("memory_weight", "spare_N"), ("cache_weight", "cache_N")]
)
def test_free_memory_and_free_cache_decide_where_they_have_a_weight(
    weight: str, array: str
) -> None:
    """Four blocks are gained, so that a quarter of the weighted term counts for each."""
    prepared = GreedyInputs.from_problem(_twins(**{array: [0.25, 0.75]}))
    added_weight: dict[str, Any] = {weight: 0.2}
    plain, weighed = GreedyParameters(), GreedyParameters(**added_weight)
    shipped, rule = (GreedyRule(prepared, each) for each in (plain, weighed))
    assert shipped.choose()[0].node == 0
    assert rule.choose()[0].node == 1
    added = rule.scores(0, ())[1] - shipped.scores(0, ())[1]
    assert added == pytest.approx([0.2 * 0.75 / 4, 0.2 * 0.25 / 4])
    chain = (Visit(1, 0, 4),)
    terms = rule.terms(chain)
    assert terms["memory"] == pytest.approx(0.2 * 0.25)
    assert terms["load"] == pytest.approx(shipped.terms(chain)["load"])
    assert "memory" not in shipped.terms(chain)


@pytest.mark.parametrize("weight", ["memory_weight", "cache_weight"])
def test_shipped_rule_gives_no_weight_to_memory(weight: str) -> None:
    assert getattr(SHIPPED_PARAMETERS, weight) == 0.0
    negative: dict[str, Any] = {weight: -1.0}
    with pytest.raises(ValueError, match="must be finite"):
        GreedyParameters(**negative)


def test_context_charges_transfers_from_earlier_senders() -> None:
    problem = covered_problem(np.random.default_rng(3), 30, 20)
    prepared = GreedyInputs.from_problem(problem)
    senders = (Visit(0, 0, 1), Visit(1, 1, 2))
    nodes, alone = GreedyRule(prepared, GreedyParameters()).scores(2, senders)
    _, both = GreedyRule(prepared, GreedyParameters(context=1)).scores(2, senders)
    gained = problem.ends_N[nodes] - 2
    extra = problem.transfer_s_NN[0, nodes] / prepared.reference_s / gained
    assert both - alone == pytest.approx(extra)


def test_blocks_go_to_the_faster_of_two_neighbours() -> None:
    problem = _twins(block_s_N=[0.02, 0.01])
    problem = replace(problem, starts_N=np.array([0, 1]), ends_N=np.array([3, 4]))
    assert shift_boundaries(problem, (Visit(0, 0, 3), Visit(1, 3, 4))) == (
        Visit(0, 0, 1),
        Visit(1, 1, 4),
    )


def test_greedy_work_grows_with_hops_not_with_nodes() -> None:
    """Array operations over all nodes, none node by node; `benchmarks routing` has the times."""
    for nodes in (100, 1000, 4000):
        problem = covered_problem(np.random.default_rng(1), nodes, 80)
        parameters = GreedyParameters(gamma=1.8, beta=1.2)
        rule = GreedyRule(GreedyInputs.from_problem(problem), parameters)
        assert count_calls(rule.choose) < 200 * len(rule.choose())


def test_published_exponents_never_lose_time_and_sometimes_save_it() -> None:
    afraid = GreedyParameters(alpha=3.0, reliability_weight=3.0)
    eager = GreedyParameters(gamma=0.5, transfer_weight=2.0)
    saved = 0
    for seed in range(20):
        problem = covered_problem(np.random.default_rng(seed), 40, 20)
        whole = apply_weights(problem)
        alone, trying = (
            step_time(whole, GreedyStrategy(published=published).choose(problem)).total_s
            for published in ((), (afraid, eager))
        )
        assert trying <= alone
        saved += trying < alone
    assert saved > 0


def test_stability_decides_where_it_has_a_weight() -> None:
    """In both rules, by as much as the weight; `explain` has its term, else it is not read."""
    problem = _twins(stability_N=[0.5, 1.0])
    rng = np.random.default_rng(0)
    blind = make_strategy("homology-greedy", rng), make_session_strategy("exact-latency", rng)
    seeing = (
        GreedyStrategy(GreedyParameters(stability_weight=0.5)),
        LatencyStrategy(failures=True, weights=CostWeights(stability=0.5)),
    )
    for strategy in blind:
        chain = strategy.choose(problem)
        assert chain[0].node == 0
        assert not {"stability", "stability_s"} & {*strategy.terms(problem, chain)}
        assert not reads_stability(strategy)
    for strategy in seeing:
        assert strategy.choose(problem)[0].node == 1
        assert reads_stability(strategy)
    shaky, sure = ((Visit(node, 0, 4),) for node in (0, 1))
    greedy, latency = seeing
    assert greedy.terms(problem, sure)["stability"] == pytest.approx(0.0)
    lost = greedy.terms(problem, shaky)
    both = (1 - 0.9 * 0.5**0.5) / (1 - 0.9)  # the median unreliability is the reference
    assert lost["reliability"] + lost["stability"] == pytest.approx(0.1 * both)
    assert lost["reliability"] == pytest.approx(0.1)
    assert latency.terms(problem, shaky)["stability_s"] == pytest.approx(0.5 * 0.5 * 10 / 200)
    assert latency.terms(problem, sure)["stability_s"] == pytest.approx(0.0)
    assert not reads_stability(replace(latency, failures=False))
    assert reads_stability(LatencyStrategy(failures=True, published=CostWeights(stability=1.0)))
    assert reads_stability(GreedyStrategy(published=(GreedyParameters(stability_weight=1.0),)))


def test_weights_change_the_default_cost_and_its_terms_add_up() -> None:
    weights = CostWeights(failure=3.0, stability=1.5, load=0.25)
    strategy = LatencyStrategy(failures=True, weights=weights)
    changed = 0
    for seed in range(20):
        problem = covered_problem(np.random.default_rng(seed), 40, 20)
        chain, plain = strategy.choose(problem), LatencyStrategy(failures=True).choose(problem)
        cost, other = (sum(strategy.terms(problem, each).values()) for each in (chain, plain))
        assert cost == pytest.approx(step_time(apply_weights(problem, weights), chain).total_s)
        assert cost <= other
        changed += chain != plain
    assert changed > 10


def test_published_weights_cost_at_most_a_twentieth_by_the_shipped_ones() -> None:
    """Orchestrators are not trusted: weights at the bounds of a search are followed so far."""
    hostile = CostWeights(failure=0.25, stability=2.0, load=0.25)
    followed = refused = 0
    for seed in range(40):
        problem = covered_problem(np.random.default_rng(seed), 40, 20)
        own = apply_weights(problem)
        alone = LatencyStrategy(failures=True).choose(problem)
        tuned = LatencyStrategy(failures=True, weights=hostile).choose(problem)
        told = LatencyStrategy(failures=True, published=hostile).choose(problem)
        alone_s, tuned_s, told_s = (step_time(own, each).total_s for each in (alone, tuned, told))
        assert told_s <= 1.05 * alone_s
        followed += told == tuned != alone
        refused += tuned_s > 1.05 * alone_s
    assert followed > 0
    assert refused > 0


def test_parameters_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        GreedyParameters(gamma=float("nan"))
    with pytest.raises(ValueError, match="below 0"):
        GreedyParameters(transfer_weight=-1.0)
    with pytest.raises(ValueError, match="below 0"):
        CostWeights(load=float("nan"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_explanation_names_the_terms_and_what_else_there_was(name: str) -> None:
    problem = covered_problem(np.random.default_rng(4), 20, 12)
    strategy = make_strategy(name, np.random.default_rng(0))
    chain = strategy.choose(problem)
    explained = explain(problem, chain, strategy)
    assert explained.cost == pytest.approx(sum(explained.terms.values()))
    assert sum(explained.step_s.values()) == pytest.approx(step_time(problem, chain).total_s)
    assert [other.excluded_peer for other in explained.alternatives] == [
        problem.peers[visit.node] for visit in chain
    ]
    for visit, other in zip(chain, explained.alternatives, strict=True):
        if other.chain is None:
            assert other.cost == math.inf
        else:
            assert visit.node not in {used.node for used in other.chain}
            if name.startswith("exact") or name in ("bottleneck", "petals"):
                assert other.cost >= explained.cost - 1e-9


def test_more_first_nodes_find_cheaper_chains_by_the_rule() -> None:
    better = 0
    for seed in range(30):
        prepared = GreedyInputs.from_problem(covered_problem(np.random.default_rng(seed), 40, 20))
        one, four = (
            GreedyRule(prepared, GreedyParameters(beam=beam, branches=branches))
            for beam, branches in ((1, 1), (4, 2))
        )
        costs = [sum(rule.terms(rule.choose()).values()) for rule in (one, four)]
        better += costs[1] < costs[0] - 1e-9
    assert better >= 5
    with pytest.raises(ValueError, match="beam"):
        GreedyParameters(beam=0)
    with pytest.raises(ValueError, match="branches"):
        GreedyParameters(branches=0)
