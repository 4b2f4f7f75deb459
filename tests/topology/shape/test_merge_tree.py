import numpy as np

from nesa_node.topology.shape.merge_tree import make_filtration, merge_tree


def test_a_branch_is_whole_if_all_its_leaves_are() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 30):
        seconds_NN = np.triu(rng.random((count, count)), 1)
        tree = merge_tree(make_filtration(seconds_NN + seconds_NN.T))
        branches = [{node} for node in range(count)]
        for first, second in tree.child_M2.tolist():
            branches.append(branches[first] | branches[second])
        for share in (0.0, 0.5, 0.9, 1.0):
            marked_N = rng.random(count) < share
            marked = set(np.flatnonzero(marked_N).tolist())
            expected = max((len(branch) for branch in branches if branch <= marked), default=0)
            assert tree.largest_branch(marked_N) == expected
