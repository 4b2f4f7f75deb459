import subprocess
import sys

# Modules of gudhi are seen in `sys.modules`, their compiled halves also among what is mapped.
PROGRAM = """
import sys
import nesa_node
from nesa_node.topology.shape.network_shape import compute_features
from nesa_node.topology.shape.gudhi_backend import GPL_MODULES
from nesa_node.topology.shape.network_shape import compute_shape
import nesa_node.topology.report
early = {name for name in ("gudhi", "scipy", "sklearn") if name in sys.modules}
assert not early, f"imported before they are needed: {early}"

import numpy as np
from nesa_node.topology.shape.merge_tree import make_filtration
point_N2 = np.random.default_rng(0).random((40, 2))
distance_NN = np.hypot(*(point_N2[:, None] - point_N2).transpose(2, 0, 1))
seen = compute_shape(make_filtration((distance_NN + distance_NN.T) / 2))
compute_features(seen)
loaded = [name for name in GPL_MODULES if sys.modules.get(name) is not None]
print(*loaded)
stand_in = sys.modules["gudhi.nerve_gic"]
assert not hasattr(stand_in, "__file__"), "gudhi's own module, not the stand-in"
licences = {
    name: getattr(module, "__license__", "")
    for name, module in sys.modules.items() if name.startswith("gudhi") and module is not None
}
print(*(name for name, licence in licences.items() if "GPL" in str(licence)))
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "gudhi" in line}
words = ("cgal", "bottleneck", "delaunay", "nerve", "euclidean", "tangential", "subsampling")
print(*(file for file in files if any(word in file for word in words)))
"""


def test_gudhi_loads_late_and_without_its_gpl_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, licensed, mapped = done.stdout.splitlines()
    assert loaded == "gudhi.nerve_gic"  # the empty stand-in
    assert not licensed
    assert not mapped


def test_no_other_module_of_the_package_imports_gudhi() -> None:
    import inspect
    from pathlib import Path

    import nesa_node
    from nesa_node.topology.shape.gudhi_backend import load_gudhi

    importers = {
        path.name
        for path in Path(nesa_node.__path__[0]).rglob("*.py")
        if "import gudhi" in path.read_text() or "from gudhi" in path.read_text()
    }
    assert importers == {Path(inspect.getfile(inspect.unwrap(load_gudhi))).name}
