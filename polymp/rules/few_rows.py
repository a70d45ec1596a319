"""Why a matrix product of few rows runs in float32: a policy's key `few_rows`.

A product reads each number of a weight once for all of its rows. With few rows, reading takes most
of its time, and a cast of the weight from float32 reads it once more and writes half as much. A row
costs less in a low dtype, so that more rows pay for the cast. How many pay depends on the machine;
benchmarks/jax_speed.py measures it. Knows sizes, and no framework.
"""

from polymp.errors import PolicyError


def check_few_rows(most: object, where: str) -> None:
    """Refuse what is no number of rows."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise PolicyError(
            f"{where}: few_rows = {most!r} is not a number of rows. Write few_rows = 32, or 0 to "
            "run products of any size by their rows."
        )


def why_float32(most: int, rows: float) -> str:
    """Say why a product that has rule lower and a float32 parameter runs in float32."""
    if rows > most:
        return ""
    times = "1 row" if rows == 1 else f"{rows} rows"
    return f"casting the float32 parameter takes longer than {times} (few_rows = {most})"
