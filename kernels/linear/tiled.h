// Blocks of packed weights in bfloat16 on the tiles of AMX. A line of a panel is a row of a tile, 16 lines are a tile.
#pragma once

#include "block.h"
#include "tiles.h"

#ifdef TANDEM_TILES

namespace tandem {

// As `multiply_block`, for up to kMaxTiledRows rows. Within a TileUse.
void multiply_tiled(int rows, int panels, const bfloat16* x, int64_t stride, const bfloat16* first_panel,
                    int64_t panel_size, int64_t num_in, WeightsAhead ahead, float* tile);

}  // namespace tandem

#endif
