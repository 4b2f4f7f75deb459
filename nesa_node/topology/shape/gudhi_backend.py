"""Wrapper of gudhi, without its parts under the GPL; the only module that imports it.

gudhi's own code is MIT, but what uses CGAL is GPL v3, and `import gudhi` loads
that, too. This package is Apache-2.0 and must not become a GPL work in memory. So before the import
the GPL modules' names are set to None in `sys.modules`: Python then raises `ImportError`, which
gudhi's `__init__` takes for a build without CGAL. It imports `gudhi.nerve_gic` unconditionally, so
an empty module replaces that one.

The modules stay blocked for the whole process; a program that needs them must import them first.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import require_node

# Of gudhi 3.13: each says `__license__ = "GPL v3"`, or "MIT (GPL v3 for sparsify_point_set)", or is
# the compiled half of one that does. `gudhi.representations` imports two of them.
GPL_MODULES = (
    "gudhi.bottleneck",
    "gudhi.cover_complex",
    "gudhi.delaunay_complex",
    "gudhi.euclidean_strong_witness_complex",
    "gudhi.euclidean_witness_complex",
    "gudhi.nerve_gic",
    "gudhi.representations",
    "gudhi.sklearn.cech_persistence",
    "gudhi.subsampling",
    "gudhi.tangential_complex",
    "gudhi._bottleneck_ext",
    "gudhi._default_cgal_random_seed_ext",
    "gudhi._delaunay_complex_ext",
    "gudhi._euclidean_strong_witness_complex_ext",
    "gudhi._euclidean_witness_complex_ext",
    "gudhi._nerve_gic_ext",
    "gudhi._subsampling_ext",
    "gudhi._tangential_complex_ext",
)
Simplex = tuple[int, ...]
_STUB_MODULE = "gudhi.nerve_gic"
# Z/2 is the field of the tests' own reduction, of ripser's default, and of cycles without signs.
_COEFFICIENT_FIELD = 2
MAX_TRIANGLES = 200_000
"""Maximum triangles of a complex in `flag_pairs`: 0.2 s and 20 MiB. 100 nodes have fewer."""


class TooManyTrianglesError(Exception):
    """A complex exceeds `MAX_TRIANGLES`; use fewer nodes or a lower threshold."""


@cache
def load_gudhi() -> Any:
    """Import gudhi with its `sklearn`; takes 0.5 s the first time.

    Raises `ConfigError` if it is not installed.
    """
    require_node("a swarm's shape", "gudhi", "sklearn")
    if "gudhi" not in sys.modules:
        for name in GPL_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
        stand_in = ModuleType(_STUB_MODULE)
        stand_in.CoverComplex = None  # type: ignore[attr-defined]
        sys.modules[_STUB_MODULE] = stand_in
    import gudhi as module
    import gudhi.sklearn

    return module


def rips_h1(weight_NN: Floats, threshold: float) -> Floats:
    """Births and deaths in H1 of the Rips filtration up to `threshold`, [P, 2] float64.

    weight_NN : [N, N] float64, symmetric, zero diagonal; inf is allowed above `threshold`.
    """
    rips = load_gudhi().sklearn.RipsPersistence(
        1,
        threshold=threshold,
        input_type="full distance matrix",
        homology_coeff_field=_COEFFICIENT_FIELD,
    )
    return np.asarray(rips.fit_transform([weight_NN])[0], dtype=np.float64).reshape(-1, 2)


def flag_pairs(
    weight_NN: Floats, threshold: float
) -> tuple[dict[Simplex, float], dict[Simplex, Simplex]]:
    """Scales of a collapsed filtration in its order, and the killing simplex of each edge's class.

    Edges are collapsed first, which keeps every class and its times. For 200 random places that
    leaves some hundred triangles up to the death of the last class of H1, but a million up to the
    longest edge: choose `threshold` accordingly.

    A simplex is the tuple of its sorted nodes. Scales cover all edges, and the triangles that kill
    a class (also one that dies as it is born). A class that never dies has the killer ().

    Raises `TooManyTrianglesError` before allocating them.
    """
    tree = load_gudhi().SimplexTree.create_from_array(weight_NN, max_filtration=threshold)
    tree.collapse_edges(1)
    if (triangles := _count_triangles(tree, len(weight_NN))) > MAX_TRIANGLES:
        raise TooManyTrianglesError(f"{triangles} triangles, more than {MAX_TRIANGLES}")
    tree.expansion(2)
    # By default gudhi omits homology of the highest dimension, which without triangles is H1.
    tree.compute_persistence(
        homology_coeff_field=_COEFFICIENT_FIELD,
        min_persistence=-1.0,
        persistence_dim_max=tree.dimension() < 2,
    )
    killer = {
        tuple(sorted(born)): tuple(sorted(dead))
        for born, dead in tree.persistence_pairs()
        if len(born) == 2
    }
    killers = set(killer.values())
    in_order = ((tuple(sorted(simplex)), scale) for simplex, scale in tree.get_filtration())
    scales: dict[Simplex, float] = {
        simplex: scale for simplex, scale in in_order if len(simplex) == 2 or simplex in killers
    }
    return scales, killer


def _count_triangles(tree: Any, nodes: int) -> int:
    """Number of triangles in the expansion of the graph `tree`."""
    near_NN = np.zeros((nodes, nodes))
    for simplex, _ in tree.get_filtration():
        near_NN[simplex[0], simplex[-1]] = near_NN[simplex[-1], simplex[0]] = 1.0
    np.fill_diagonal(near_NN, 0.0)
    return round(float(np.vdot(near_NN @ near_NN, near_NN)) / 6)
