// Whether linears go through tiles.
#include "linear/block.h"
#include "native/entry.h"

TANDEM_ENTRY int32_t probe_has_tiles() { return tandem::has_tiles(); }
