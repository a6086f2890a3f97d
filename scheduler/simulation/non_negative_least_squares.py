"""min |A x - y| over x >= 0, by the active-set method of Lawson and Hanson (1974), on the normal equations."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

TOLERANCE = 1e-10
MAX_ROUNDS = 10  # per unknown


def non_negative_least_squares(matrix: FloatArray, values: FloatArray) -> FloatArray:
    """The solution, one number for each column of the matrix; columns of zeros get 0."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    scaled = matrix / scale
    gram, target = scaled.T @ scaled, scaled.T @ values
    solution = np.zeros(len(scale))
    is_free = np.zeros(len(scale), np.bool_)
    threshold = TOLERANCE * max(1e-300, float(np.abs(target).max()))
    for _ in range(MAX_ROUNDS * len(scale)):
        gradient = np.where(is_free, -np.inf, target - gram @ solution)
        best = int(np.argmax(gradient))
        if gradient[best] <= threshold:
            break
        is_free[best] = True
        solution = _solve_free(gram, target, solution, is_free)
    return np.asarray(solution / scale)


def _solve_free(gram: FloatArray, target: FloatArray, solution: FloatArray, is_free: NDArray[np.bool_]) -> FloatArray:
    """Solve for the free unknowns; those that would turn negative are bound to 0 again. Changes `is_free`."""
    while is_free.any():
        wanted = np.zeros(len(solution))
        free = np.flatnonzero(is_free)
        wanted[free] = np.linalg.lstsq(gram[np.ix_(free, free)], target[free], rcond=None)[0]
        negative = is_free & (wanted <= 0)
        if not negative.any():
            return wanted
        steps = solution[negative] / np.maximum(solution[negative] - wanted[negative], 1e-300)
        solution = solution + float(steps.min()) * (wanted - solution)
        is_free &= solution > TOLERANCE * max(1e-300, float(np.abs(solution).max()))
        solution[~is_free] = 0
    return solution
