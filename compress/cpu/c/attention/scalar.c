#define LANES_OF_PIECE 4
#include "attention/simd.h"

void attend_part_scalar(const Part *part, PartResult *result) { attend_part(part, result); }
