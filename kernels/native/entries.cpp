#include "entry.h"
#include "team.h"

TANDEM_ENTRY tandem::Team* tandem_team_new(int32_t num_threads, int32_t max_phases) {
    return new tandem::Team(num_threads, max_phases);
}

TANDEM_ENTRY void tandem_team_delete(tandem::Team* team) { delete team; }
