"""CRC-32 of bytes that are looked at in pieces, in any order."""

_POLYNOMIAL = 0xEDB88320
_ONE, _BYTE = 1 << 31, 1 << 23  # x to the power of 0 and of 8, the lowest power in the highest bit


def join_crc32(first: int, second: int, num_bytes: int) -> int:
    """CRC-32 of two pieces one behind the other, of the CRC-32 of each and the size of the second.

    CRCs are remainders of polynomials over two elements: the first is multiplied by x to the power of the bits behind it.
    """
    shift, power = _ONE, _BYTE
    while num_bytes:
        if num_bytes & 1:
            shift = _multiply(shift, power)
        power = _multiply(power, power)
        num_bytes >>= 1
    return _multiply(first, shift) ^ second


def _multiply(a: int, b: int) -> int:
    product = 0
    for place in range(31, -1, -1):
        if a >> place & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
