"""`nesa-node simulate`: effects of joining and lost nodes on a described or recorded swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from nesa_node.cli.flags import OUTPUT, JsonFlag
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.choices import StrategyName
from nesa_node.core.wait_tracking import track_wait

SWARM_GROUP = Group("Which swarm", sort_key=5)
CHANGES_GROUP = Group("What changes", sort_key=6)
GOALS_GROUP = Group("What is wanted", sort_key=7)


def simulate(
    *,
    nodes: Annotated[
        Path | None,
        Parameter(
            group=SWARM_GROUP,
            help="A file that describes a swarm: docs/simulate.md. Or a number: so many made-up "
            "nodes.",
        ),
    ] = None,
    world: Annotated[
        str | None,
        Parameter(
            metavar="NUMBERS",
            group=SWARM_GROUP,
            help="A made-up swarm instead: regions=3,nodes=30,blocks=80,clients=4,homes=0.7.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        Parameter(
            group=SWARM_GROUP,
            help="Recorded snapshots instead: an orchestrator's store (--snapshots-dir), or one "
            "JSON document per line.",
        ),
    ] = None,
    seed: Annotated[int, Parameter(group=SWARM_GROUP, help="Seed of the made-up swarm.")] = 0,
    add: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NODES",
            group=CHANGES_GROUP,
            negative=(),
            help="Nodes that join, at this round-trip time to all nodes (rtx3090@40ms) or in a "
            "region (3xa100@london); may be repeated.",
        ),
    ] = (),
    remove: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NAME",
            group=CHANGES_GROUP,
            negative=(),
            help="Nodes that are lost, by name or pattern (lab-*); may be repeated.",
        ),
    ] = (),
    goal: Annotated[
        Literal["latency", "throughput"], Parameter(group=GOALS_GROUP, help="Objective of moves.")
    ] = "latency",
    replicas: Annotated[
        int, Parameter(group=GOALS_GROUP, help="Replicas wanted of every block.")
    ] = 2,
    strategy: Annotated[
        StrategyName, Parameter(group=GOALS_GROUP, help="How sessions choose their chain.")
    ] = "exact-latency",
    pareto: Annotated[
        bool,
        Parameter(
            group=GOALS_GROUP,
            negative=(),
            help="Show instead the chains that no other beats at once in time, tokens/s, "
            "reliability and price.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, Parameter(group=OUTPUT, help="Draw it, too: a file that ends in .svg or .png.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Show how joins and losses change a swarm: latency, throughput, coverage and moves.

    No node is started or contacted: the planners of a live swarm run on a description.
    """
    if nodes is not None and world is None and str(nodes).isdecimal() and not nodes.exists():
        nodes, world = None, f"nodes={nodes}"
    if sum(given is not None for given in (nodes, world, replay)) != 1:
        raise ConfigError("give one of --nodes FILE, --world KEY=NUMBER,... and --replay FILE")
    if not 1 <= replicas <= 100:
        raise ConfigError(f"--replicas {replicas}: a number from 1 to 100")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: a whole number from 0")
    if replay is not None and (add or remove):
        raise ConfigError("--replay shows what was recorded: leave out --add and --remove")
    if replay is not None and pareto:
        raise ConfigError("--pareto is for one swarm: give --nodes or --world instead of --replay")
    from nesa_node.cli.simulation_input import (
        MAX_DENSE_NODES,
        LargeSimulatedSwarm,
        SimulatedSwarm,
        load_strategy,
        make_world_swarm,
        read_swarm_file,
    )
    from nesa_node.cli.views import simulation as plots
    from nesa_node.cli.views import simulation as views

    if plot is not None:
        plots.check_plot(plot)
    use = load_strategy(strategy)
    if replay is not None:
        from nesa_node.cli.simulation_input import replay_snapshots

        with track_wait("the planners to go through the snapshots"):
            rows = replay_snapshots(replay, goal=goal, replicas=replicas, strategy=use)
        views.print_replay(rows, as_json=as_json)
        if plot is not None:
            plots.plot_replay(rows, plot)
        return 0
    with track_wait("the planners to place the nodes"):
        scene = read_swarm_file(nodes) if nodes is not None else make_world_swarm(world or "", seed)
        asked = scene.make_question(goal=goal, replicas=replicas, strategy=use)
        if pareto and isinstance(scene, LargeSimulatedSwarm):
            raise ConfigError(f"--pareto is for swarms of up to {MAX_DENSE_NODES} nodes")
        if pareto and isinstance(scene, SimulatedSwarm):
            chains = scene.find_pareto_chains(add, remove, asked, seed)
            views.print_pareto(scene, chains, as_json=as_json)
            if plot is not None:
                plots.plot_pareto(chains, plot)
            return 0
        outcome = scene.apply_changes(add, remove, asked)
    views.print_outcome(outcome, as_json=as_json)
    if plot is not None:
        plots.plot_outcome(outcome, plot)
    return 0
