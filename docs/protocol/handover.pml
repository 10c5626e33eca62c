/* The hand-over core: one gateway, one decode worker (engine and an asynchronous receiver), two prefill workers, and
 * Redis as a job queue and a task table.
 *
 * One event is one atomic step of one process; whatever lies between two events can be interleaved, delayed, killed or
 * frozen. Every run is finite (faults, placements and tries are bounded), so "eventually" is asserted where nothing more
 * can happen (`timeout`), plus a search for cycles.
 *
 * Content: a page holds TAG(request, chunk) when it was written completely, HALF while it is not. Token 0 is sampled as
 * 0 or 1 by whoever prefills (two prefills may differ in a near-tie); token 1 carries the token 0 that it was computed
 * from, so a stitched stream shows as a wrong value.
 *
 * Simplified here and modelled exactly in link.pml: claiming a task, binding it and numbering the try are one step, and
 * messages on a live connection are neither lost nor doubled.
 */

/* ---- size of a configuration ------------------------------------------------------------------------------------ */

#ifndef NUM_REQUESTS
#define NUM_REQUESTS 2
#endif
#ifndef NUM_CHUNKS
#define NUM_CHUNKS 1          /* chunks per prompt; a chunk is a page */
#endif
#ifndef NUM_SLOTS
#define NUM_SLOTS 1           /* the decode worker's pool, in prompts: 1 forces reuse */
#endif
#ifndef MAX_PLACEMENTS
#define MAX_PLACEMENTS 2
#endif
#ifndef MAX_TRIES
#define MAX_TRIES 2           /* prefill tries per placement, then local */
#endif
#ifndef FAULTS
#define FAULTS 1              /* kills and freezes together */
#endif
#ifndef FAULT_KINDS           /* 1 kill prefill, 2 freeze prefill, 4 kill decode, 8 freeze decode */
#define FAULT_KINDS 15
#endif
#ifndef SLOWNESS
#define SLOWNESS 0            /* leases and patience that end though the peer is only slow */
#endif
#ifndef CANCELS
#define CANCELS 1             /* clients that leave */
#endif
#ifndef WIPES
#define WIPES 0               /* Redis restarts empty */
#endif
#ifndef LOCAL_AT_ONCE
#define LOCAL_AT_ONCE false   /* true: a prompt may be prefilled locally without any try */
#endif
#ifndef OTHER_TOKEN
#define OTHER_TOKEN 1         /* 0: every prefill samples the same token 0, which are fewer states */
#endif

#define ALL_CHUNKS ((1 << NUM_CHUNKS) - 1)
#define ALL_SLOTS ((1 << NUM_SLOTS) - 1)
#define TAG(request, chunk) ((request) * NUM_CHUNKS + (chunk) + 1)
#define HALF 15
#define NOBODY 9

/* a process */
#define DOWN 0
#define UP 1
#define FROZEN 2
/* a request at the gateway */
#define TO_PLACE 0
#define PLACED 1
#define DONE 2
#define FAILED 3
#define CANCELLED 4
/* a sequence on the decode worker, and IDLE also for a prefill worker */
#define IDLE 0
#define RECEIVING 1
#define DECODING 2
#define QUARANTINED 3         /* over, but a copy into its pages still runs */
/* a binding on a prefill worker */
#define COMPUTING 1
#define HALF_COMPUTED 2
#define SENDING 3             /* owes the early copy, the commit or both */
#define HELD 4
/* a task in Redis */
#define NO_TASK 0
#define PUBLISHED 1
#define CLAIMED 2
/* kinds of message */
#define ANNOUNCE 1
#define COMMIT 2
#define RELEASE 3
#define STALE 4
/* a running copy: check, first half, second half, check */
#define CHECK_BEFORE 1
#define FIRST_HALF 2
#define SECOND_HALF 3
#define CHECK_AFTER 4

/* ---- state ------------------------------------------------------------------------------------------------------ */

byte faults_left = FAULTS, slowness_left = SLOWNESS, cancels_left = CANCELS, wipes_left = WIPES;
bit has_missed = 0;           /* a pull was wasted */
bit is_calm;
#define MAY(budget) (budget > 0 && !is_calm)

/* Redis */
chan jobs = [2] of { byte, byte, byte, byte, byte };  /* request, placement, decode epoch, shown tokens, token 0 */
byte t_state[NUM_REQUESTS], t_owner[NUM_REQUESTS], t_owner_epoch[NUM_REQUESTS];
byte t_placement[NUM_REQUESTS], t_try[NUM_REQUESTS], t_shown[NUM_REQUESTS], t_author_epoch[NUM_REQUESTS];

/* gateway; g_shown tokens are at the client, the first of them is g_token; g_epoch is that of the placement's worker */
byte g_state[NUM_REQUESTS], g_placement[NUM_REQUESTS], g_shown[NUM_REQUESTS], g_token[NUM_REQUESTS];
byte g_epoch[NUM_REQUESTS];
#ifdef NO_REPEAT
bit g_has_second[NUM_REQUESTS];                       /* token 1 came before any token 0 */
byte g_second[NUM_REQUESTS];
#endif
chan cancels = [3] of { byte, byte };                 /* request, placement */
chan frames = [2] of { byte, byte, byte, byte };      /* request, placement, index, token */
chan early_copies = [2] of { byte, byte, byte };      /* request, placement, token 0 */

/* decode worker; a sequence has slot d_slot of the pool and is bound to prefill worker d_bound */
byte d_up = UP, d_epoch = 1, d_free = ALL_SLOTS;
byte d_state[NUM_REQUESTS], d_placement[NUM_REQUESTS], d_try[NUM_REQUESTS], d_arrived[NUM_REQUESTS];
byte d_committed[NUM_REQUESTS], d_token[NUM_REQUESTS], d_index[NUM_REQUESTS], d_slot[NUM_REQUESTS];
byte d_bound[NUM_REQUESTS], d_publications[NUM_REQUESTS];
byte d_tombstone[NUM_REQUESTS];                       /* this placement and older ones are over */
byte d_page[NUM_SLOTS * NUM_CHUNKS] = HALF;
byte job_request = NOBODY, job_placement, job_epoch, job_shown, job_token;   /* read, not taken in yet */
/* its receiver: one copy at a time */
byte c_phase, c_request, c_placement, c_try, c_chunk, c_slot, c_source, c_generation, c_epoch, c_seen;

/* prefill workers: a pool of one prompt each */
byte p_up[2] = UP, p_epoch[2] = 1, p_generation[2];
byte p_state[2], p_request[2], p_placement[2], p_try[2], p_shown[2], p_chunk[2], p_author_epoch[2];
byte p_owes_early[2], p_owes_commit[2], p_token[2];   /* p_token: token 0 plus 1, 0 while it is not sampled */
bit p_free[2] = 1;
byte p_page[2 * NUM_CHUNKS];
chan to_d_0 = [2] of { byte, byte, byte, byte, byte, byte, byte };
chan to_d_1 = [2] of { byte, byte, byte, byte, byte, byte, byte };
                                                      /* kind, request, placement, try, chunk, generation|token, epoch */
chan to_p_0 = [2] of { byte, byte, byte, byte };      /* kind, request, placement, try */
chan to_p_1 = [2] of { byte, byte, byte, byte };

byte a, b, c, d, e, f, h, i;  /* scratch of one step, zero between steps */
bit has_claimed;              /* symmetry: worker 0 claims first */

/* ---- the rules that can be removed -------------------------------------------------------------------------------- */

#ifdef NO_EPOCH_IN_REF
#define SAME_EPOCH true
#else
#define SAME_EPOCH (p_epoch[c_source] == c_epoch)
#endif
#ifdef NO_GEN
#define REFERENCE_HOLDS true
#else
#define REFERENCE_HOLDS (SAME_EPOCH && p_generation[c_source] == c_generation)
#endif
#ifdef NO_ORPHAN
#define HAS_AUTHOR(r) true
#else
#define HAS_AUTHOR(r) (d_up != DOWN && t_author_epoch[r] == d_epoch)
#endif
#ifdef KEEP_OLD               /* leases are renewed per peer instead of per binding */
#define RENEWS(p) true
#else
#define RENEWS(p) (d_bound[p_request[p]] == p && d_placement[p_request[p]] == p_placement[p] && d_try[p_request[p]] == p_try[p])
#endif
#ifdef NO_COMPLETE
#define IS_COMPLETE(r) (d_committed[r] == 1)
#else
#define IS_COMPLETE(r) (d_committed[r] == 1 && d_arrived[r] == ALL_CHUNKS && !IS_COPYING(r))
#endif
#ifdef NO_REPUB
#define MAY_REPUBLISH false
#else
#define MAY_REPUBLISH true
#endif
#ifdef NO_ACCEPT_TIMER
#define MAY_MISS_JOB false
#else
#define MAY_MISS_JOB true
#endif
#ifdef IDX_ONLY
#define IS_CURRENT(r, placement) (g_state[r] == PLACED)
#else
#define IS_CURRENT(r, placement) (g_state[r] == PLACED && g_placement[r] == placement)
#endif
#ifdef NO_TOMBSTONE
#define IS_BURIED false
#else
#define IS_BURIED (job_placement <= d_tombstone[job_request])
#endif

#define IS_COPYING(r) (c_phase != 0 && c_request == r)
#define IS_TRY(r, placement, try) (d_state[r] == RECEIVING && d_placement[r] == placement && d_try[r] == try)
#define CLAIMER_IS_LOST(r) (t_state[r] == CLAIMED && (p_up[t_owner[r]] != UP || p_epoch[t_owner[r]] != t_owner_epoch[r]))
#define TRIES(r) (t_try[r] & 3)          /* each publication numbers from the next multiple of four */
#define IS_WANTED (job_epoch == d_epoch && !IS_BURIED && \
    (d_state[job_request] == IDLE || d_placement[job_request] < job_placement))

/* ---- invariants and parts of steps -------------------------------------------------------------------------------- */

/* S3: nothing is both free and owned, nothing is owned twice */
inline check_ownership() {
  d_step {
    i = 0;
    do
    :: i < NUM_REQUESTS ->
       if
       :: d_state[i] != IDLE ->
          assert(!(d_free & (1 << d_slot[i])));
          if
          :: c_phase != 0 && c_request != i && d_state[c_request] != IDLE -> assert(c_slot != d_slot[i])
          :: else
          fi
       :: else
       fi;
       i++
    :: else -> break
    od;
#if NUM_REQUESTS == 2
    assert(!(d_state[0] != IDLE && d_state[1] != IDLE && d_slot[0] == d_slot[1]));
#endif
#ifndef FREE_DST
    assert(c_phase == 0 || !(d_free & (1 << c_slot)));   /* a running copy is an owner, too */
#endif
    i = 0
  }
}

inline tell_prefill(p, kind, r, placement, try) {
  if
  :: p == 0 && p_up[0] != DOWN && len(to_p_0) < 2 -> to_p_0!kind,r,placement,try
  :: p == 1 && p_up[1] != DOWN && len(to_p_1) < 2 -> to_p_1!kind,r,placement,try
  :: else
  fi
}

inline delete_task(r) {
  t_state[r] = NO_TASK; t_owner[r] = 0; t_owner_epoch[r] = 0; t_placement[r] = 0; t_try[r] = 0; t_shown[r] = 0;
  t_author_epoch[r] = 0
}

inline free_slot(r) {
  i = 0;
  do
  :: i < NUM_CHUNKS && d_state[r] != IDLE -> d_page[d_slot[r] * NUM_CHUNKS + i] = HALF; i++
  :: else -> break
  od;
  i = 0;
  d_state[r] = IDLE; d_free = d_free | (1 << d_slot[r]);
  d_placement[r] = 0; d_try[r] = 0; d_arrived[r] = 0; d_committed[r] = 0; d_token[r] = 0; d_index[r] = 0;
  d_slot[r] = 0; d_publications[r] = 0; d_bound[r] = NOBODY
}

/* Every end of a sequence on the decode worker: its task, its binding, its pages. */
inline leave(r) {
  if
  :: t_placement[r] == d_placement[r] -> delete_task(r)
  :: else
  fi;
  if
  :: d_bound[r] != NOBODY -> tell_prefill(d_bound[r], STALE, r, d_placement[r], d_try[r])
  :: else
  fi;
#ifdef FREE_DST
  free_slot(r)
#else
  if
  :: IS_COPYING(r) -> d_state[r] = QUARANTINED
  :: else -> free_slot(r)
  fi
#endif
}

inline stop_copy() {
  if
  :: d_state[c_request] == QUARANTINED -> free_slot(c_request)
  :: else
  fi;
  forget_copy()
}

inline forget_copy() {
  c_phase = 0; c_request = 0; c_placement = 0; c_try = 0; c_chunk = 0; c_slot = 0; c_source = 0; c_generation = 0;
  c_epoch = 0; c_seen = 0
}

/* A page was not what its reference said: that try is over, the task is offered again. */
inline miss() {
  has_missed = 1;
  if
  :: IS_TRY(c_request, c_placement, c_try) ->
     if
     :: t_state[c_request] == CLAIMED && t_try[c_request] == c_try && t_placement[c_request] == c_placement ->
        t_state[c_request] = PUBLISHED
     :: else
     fi;
     tell_prefill(c_source, RELEASE, c_request, c_placement, c_try);
     d_try[c_request] = c_try + 1; d_bound[c_request] = NOBODY; d_arrived[c_request] = 0; d_committed[c_request] = 0
  :: else
  fi
}

inline forget_job() { job_request = NOBODY; job_placement = 0; job_epoch = 0; job_shown = 0; job_token = 0 }

/* The gateway gives the current placement up. */
inline place_again(r) {
  send_cancel(r);
  if
  :: g_placement[r] < MAX_PLACEMENTS -> g_state[r] = TO_PLACE
  :: else -> g_state[r] = FAILED; g_shown[r] = 0; g_token[r] = 0
  fi
}

inline send_cancel(r) {
  if
  :: g_placement[r] > 0 && d_up != DOWN && g_epoch[r] == d_epoch && len(cancels) < 3 -> cancels!r,g_placement[r]
  :: else
  fi
}

inline forget_binding(p) {
  p_state[p] = IDLE; p_request[p] = 0; p_placement[p] = 0; p_try[p] = 0; p_shown[p] = 0; p_chunk[p] = 0;
  p_owes_early[p] = 0; p_owes_commit[p] = 0; p_token[p] = 0; p_free[p] = 1
}

/* Ends a binding: the generation first, then the free list. */
inline free_pages(p) {
#ifndef GEN_LATE
  if
  :: p_state[p] != IDLE -> p_generation[p]++
  :: else
  fi;
#endif
  forget_binding(p);
  if                                     /* nobody knows a reference any more: fewer states */
  :: c_phase != 0 && c_source == p
  :: p == 0 && len(to_d_0) > 0
  :: p == 1 && len(to_d_1) > 0
  :: else ->
     p_generation[p] = 0; i = 0;
     do
     :: i < NUM_CHUNKS -> p_page[p * NUM_CHUNKS + i] = 0; i++
     :: else -> break
     od;
     i = 0
  fi
}

/* S2: token 1 reaches the client and continues the token 0 that it was shown. */
inline show_second(r, token) {
  assert(g_shown[r] == 1);
  assert(token == g_token[r]);
  g_shown[r] = 0; g_token[r] = 0; g_state[r] = DONE
}

/* ---- gateway ------------------------------------------------------------------------------------------------------- */

inline place(r) {
  d_step { g_state[r] == TO_PLACE && d_up != DOWN && len(jobs) < 2 ->
    g_placement[r]++; g_state[r] = PLACED; g_epoch[r] = d_epoch;
    jobs!r,g_placement[r],d_epoch,g_shown[r],g_token[r] }
}

inline client_leaves(r) {
  d_step { MAY(cancels_left) && g_state[r] < DONE ->
    cancels_left--; send_cancel(r); g_state[r] = CANCELLED; g_shown[r] = 0; g_token[r] = 0 }
}

inline lose_worker(r) {
  d_step { g_state[r] == PLACED && (d_up != UP || d_epoch != g_epoch[r]) -> place_again(r) }
}

inline lose_patience(r) {
  d_step { g_state[r] == PLACED && MAY(slowness_left) && d_up == UP && d_epoch == g_epoch[r] ->
    slowness_left--; place_again(r) }
}

/* Neither accepted nor findable: only a Redis that lost its data makes that happen here. */
inline miss_job(r) {
  d_step { MAY_MISS_JOB && wipes_left < WIPES && job_request == NOBODY && g_state[r] == PLACED && d_up == UP &&
    d_epoch == g_epoch[r] && (d_state[r] == IDLE || d_placement[r] != g_placement[r]) && len(jobs) == 0 &&
    len(frames) == 0 -> place_again(r) }
}

/* A frame: only the current placement's next index, and only if it continues what was shown. */
inline take_frame() {
  d_step { len(frames) > 0 ->
    frames?a,b,c,d;                                    /* request, placement, index, token */
    if
    :: !IS_CURRENT(a, b)
    :: else ->
       if
       :: c == g_shown[a] && c == 0 -> g_shown[a] = 1; g_token[a] = d
#ifdef NO_CHAIN
       :: c == g_shown[a] && c == 1 -> show_second(a, d)
       :: c < g_shown[a]
#else
       :: c == g_shown[a] && c == 1 && d == g_token[a] -> show_second(a, d)
       :: c <= g_shown[a] && c <= 1 && g_shown[a] > 0 && d != g_token[a] -> place_again(a)    /* what is shown stands */
       :: c < g_shown[a] && d == g_token[a]
#endif
       :: c > g_shown[a] ->
#ifdef NO_REPEAT
          g_has_second[a] = 1; g_second[a] = d
#else
          assert(false)                                /* the author repeats token 0, so none is ever missing */
#endif
       fi
    fi;
    a = 0; b = 0; c = 0; d = 0 }
}

inline take_early_copy() {
  d_step { len(early_copies) > 0 ->
    early_copies?a,b,c;                                /* request, placement, token 0 */
    if
    :: IS_CURRENT(a, b) && g_shown[a] == 0 ->
       g_shown[a] = 1; g_token[a] = c;
#ifdef NO_REPEAT
       if
       :: g_has_second[a] -> show_second(a, g_second[a])
       :: else
       fi
#endif
    :: else
    fi;
    a = 0; b = 0; c = 0 }
}

/* ---- prefill worker p ------------------------------------------------------------------------------------------------ */

inline bind_task(p, r) {
  t_owner[r] = p; t_owner_epoch[r] = p_epoch[p]; t_try[r]++;
  p_state[p] = COMPUTING; p_request[p] = r; p_placement[p] = t_placement[r]; p_try[p] = t_try[r];
  p_shown[p] = t_shown[r]; p_chunk[p] = 0; p_free[p] = 0; p_author_epoch[p] = d_epoch
}

inline claim(p, r) {
  d_step { (p == 0 || has_claimed) && p_up[p] == UP && p_state[p] == IDLE && p_free[p] && TRIES(r) < MAX_TRIES &&
    HAS_AUTHOR(r) && (t_state[r] == PUBLISHED || CLAIMER_IS_LOST(r)) ->
    has_claimed = 1; t_state[r] = CLAIMED; bind_task(p, r) }
}

/* The author gave up on a claimer that is only slow. */
inline claim_slow(p, r) {
  d_step { MAY(slowness_left) && p_up[p] == UP && p_state[p] == IDLE && p_free[p] && TRIES(r) < MAX_TRIES &&
    HAS_AUTHOR(r) && t_state[r] == CLAIMED && !CLAIMER_IS_LOST(r) && t_owner[r] != p ->
    slowness_left--; bind_task(p, r) }
}

inline delete_orphan(r) {
  d_step { (p_up[0] == UP || p_up[1] == UP) && t_state[r] != NO_TASK && !HAS_AUTHOR(r) -> delete_task(r) }
}

inline compute_half(p) {
  d_step { p_up[p] == UP && p_state[p] == COMPUTING ->
    p_page[p * NUM_CHUNKS + p_chunk[p]] = HALF; p_state[p] = HALF_COMPUTED }
}

inline announce(p, to_d) {
  d_step { p_up[p] == UP && p_state[p] == HALF_COMPUTED && len(to_d) < 2 ->
    p_page[p * NUM_CHUNKS + p_chunk[p]] = TAG(p_request[p], p_chunk[p]);
#ifdef GEN_LATE
    if
    :: p_chunk[p] == 0 -> p_generation[p]++
    :: else
    fi;
#endif
    if
    :: d_up != DOWN && d_epoch == p_author_epoch[p] ->
       to_d!ANNOUNCE,p_request[p],p_placement[p],p_try[p],p_chunk[p],p_generation[p],p_epoch[p]
    :: else
    fi;
    p_chunk[p]++;
    if
    :: p_chunk[p] < NUM_CHUNKS -> p_state[p] = COMPUTING
    :: else -> p_state[p] = SENDING; p_owes_early[p] = (p_shown[p] == 0); p_owes_commit[p] = 1
    fi }
}

inline sample(p, token) {
  d_step { p_up[p] == UP && p_state[p] == SENDING && p_token[p] == 0 -> p_token[p] = token + 1 }
}

inline send_early_copy(p) {
  d_step { p_up[p] == UP && p_state[p] == SENDING && p_owes_early[p] == 1 && p_token[p] > 0 && len(early_copies) < 2 ->
    early_copies!p_request[p],p_placement[p],p_token[p] - 1;
    p_owes_early[p] = 0;
    if
    :: p_owes_commit[p] == 0 -> p_state[p] = HELD
    :: else
    fi }
}

inline commit(p, to_d) {
  d_step { p_up[p] == UP && p_state[p] == SENDING && p_owes_commit[p] == 1 && p_token[p] > 0 && len(to_d) < 2 ->
    if
    :: d_up != DOWN && d_epoch == p_author_epoch[p] ->
       to_d!COMMIT,p_request[p],p_placement[p],p_try[p],0,p_token[p] - 1,p_epoch[p]
    :: else
    fi;
#ifdef ACK_BY_P
    delete_task(p_request[p]);
#endif
    p_owes_commit[p] = 0;
    if
#ifdef FREE_SRC
    :: p_owes_early[p] == 0 -> free_pages(p)
#else
    :: p_owes_early[p] == 0 -> p_state[p] = HELD
#endif
    :: else
    fi }
}

/* Release or stale: both end the binding. */
inline obey(p, to_p) {
  d_step { p_up[p] == UP && len(to_p) > 0 ->
    to_p?a,b,c,d;                                      /* kind, request, placement, try */
    if
    :: p_state[p] != IDLE && p_request[p] == b && p_placement[p] == c && p_try[p] == d ->
       if
       :: a == STALE && t_state[b] == CLAIMED && t_owner[b] == p && t_owner_epoch[b] == p_epoch[p] &&
          t_placement[b] == c && t_try[b] == d -> delete_task(b)
       :: else
       fi;
       free_pages(p)
    :: else
    fi;
    a = 0; b = 0; c = 0; d = 0 }
}

inline end_lease(p, to_d) {
  d_step { p_up[p] == UP && p_state[p] == HELD && (d_up != UP || d_epoch != p_author_epoch[p] ||
    (len(to_d) == 0 && !RENEWS(p)) || MAY(slowness_left)) ->
    if
    :: d_up == UP && d_epoch == p_author_epoch[p] && (len(to_d) > 0 || RENEWS(p)) -> slowness_left--
    :: else
    fi;
    if
    :: t_state[p_request[p]] == CLAIMED && t_owner[p_request[p]] == p &&
       t_owner_epoch[p_request[p]] == p_epoch[p] && t_placement[p_request[p]] == p_placement[p] ->
       t_state[p_request[p]] = PUBLISHED
    :: else
    fi;
    free_pages(p) }
}

/* ---- decode worker --------------------------------------------------------------------------------------------------- */

inline read_job() {
  d_step { d_up == UP && job_request == NOBODY && len(jobs) > 0 ->
    jobs?job_request,job_placement,job_epoch,job_shown,job_token }
}

/* Of an older epoch, cancelled before it came, or here already. */
inline drop_job() {
  d_step { d_up == UP && job_request != NOBODY && !IS_WANTED -> forget_job() }
}

inline supersede() {
  d_step { d_up == UP && job_request != NOBODY && IS_WANTED &&
    (d_state[job_request] == RECEIVING || d_state[job_request] == DECODING) ->
    leave(job_request); check_ownership() }
}

inline take_in() {
  d_step { d_up == UP && job_request != NOBODY && IS_WANTED && d_state[job_request] == IDLE && d_free != 0 ->
    assert(job_placement > d_tombstone[job_request]);  /* C1: no work begins after its cancel was heard */
    i = 0;
    do
    :: !(d_free & (1 << i)) -> i++
    :: else -> break
    od;
    d_slot[job_request] = i; d_free = d_free & ~(1 << i); i = 0;
    d_state[job_request] = RECEIVING; d_placement[job_request] = job_placement; d_try[job_request] = 0;
    d_arrived[job_request] = 0; d_committed[job_request] = 0; d_bound[job_request] = NOBODY;
    d_index[job_request] = job_shown; d_token[job_request] = job_token;
    publish(job_request); t_try[job_request] = 0;
    forget_job(); check_ownership() }
}

inline publish(r) {
  t_state[r] = PUBLISHED; t_placement[r] = d_placement[r]; t_shown[r] = d_index[r]; t_author_epoch[r] = d_epoch
}

/* Redis lost the task and nobody is known to work on it. */
inline republish(r) {
  d_step { MAY_REPUBLISH && d_up == UP && wipes_left < WIPES && d_state[r] == RECEIVING && t_state[r] == NO_TASK &&
    !IS_COMPLETE(r) && !IS_COPYING(r) ->
    publish(r);
#ifdef REUSE_TRY                         /* the number comes from Redis, which has forgotten the older ones */
    if
    :: t_try[r] < d_try[r] -> t_try[r] = d_try[r]
    :: else
    fi
#else                                    /* the author numbers its publications; older tries are fenced and told */
    d_publications[r]++;
    t_try[r] = 4 * d_publications[r];
    if
    :: d_bound[r] != NOBODY -> tell_prefill(d_bound[r], STALE, r, d_placement[r], d_try[r])
    :: else
    fi;
    d_try[r] = 4 * d_publications[r]; d_bound[r] = NOBODY; d_arrived[r] = 0; d_committed[r] = 0
#endif
  }
}

/* A cancel may come before its job. */
inline take_cancel() {
  d_step { d_up == UP && len(cancels) > 0 ->
    cancels?a,b;                                       /* request, placement */
    if
    :: b > d_tombstone[a] -> d_tombstone[a] = b
    :: else
    fi;
    if
    :: (d_state[a] == RECEIVING || d_state[a] == DECODING) && d_placement[a] <= b -> leave(a)
    :: else
    fi;
    a = 0; b = 0; check_ownership() }
}

/* A finished chunk: bind to a newer try (the old claimer is told), begin to copy. */
inline take_announce(p, to_d) {
  d_step { d_up == UP && c_phase == 0 && to_d?[ANNOUNCE,_,_,_,_,_,_] ->
    to_d?a,b,c,d,e,f,h;                                /* kind, request, placement, try, chunk, generation, epoch */
    if
    :: d_state[b] == RECEIVING && d_placement[b] == c && d >= d_try[b] ->
       if
       :: d > d_try[b] ->
#ifndef KEEP_OLD
          if
          :: d_bound[b] != NOBODY -> tell_prefill(d_bound[b], STALE, b, c, d_try[b])
          :: else
          fi;
#endif
          d_try[b] = d; d_arrived[b] = 0; d_committed[b] = 0; d_bound[b] = p
       :: else
       fi;
       if
       :: d_arrived[b] & (1 << e)
       :: else ->
          c_phase = CHECK_BEFORE; c_request = b; c_placement = c; c_try = d; c_chunk = e; c_slot = d_slot[b];
          c_source = p; c_generation = f; c_epoch = h
       fi
    :: else -> tell_prefill(p, STALE, b, c, d)
    fi;
    a = 0; b = 0; c = 0; d = 0; e = 0; f = 0; h = 0; check_ownership() }
}

inline take_commit(p, to_d) {
  d_step { d_up == UP && to_d?[COMMIT,_,_,_,_,_,_] ->
    to_d?a,b,c,d,e,f,h;                                /* kind, request, placement, try, -, token, epoch */
    if
    :: IS_TRY(b, c, d) && d_committed[b] == 0 ->
       d_committed[b] = 1;
       if
       :: d_index[b] == 0 -> d_token[b] = f
       :: else
       fi
    :: IS_TRY(b, c, d) && d_committed[b] == 1
    :: else -> tell_prefill(p, STALE, b, c, d)
    fi;
    a = 0; b = 0; c = 0; d = 0; e = 0; f = 0; h = 0 }
}

inline start_decoding(r) {
  d_step { d_up == UP && d_state[r] == RECEIVING && IS_COMPLETE(r) ->
    d_state[r] = DECODING;
    if
    :: t_placement[r] == d_placement[r] -> delete_task(r)
    :: else
    fi;
    if
    :: d_bound[r] != NOBODY -> tell_prefill(d_bound[r], RELEASE, r, d_placement[r], d_try[r])
    :: else
    fi;
#ifdef NO_REPEAT                         /* relies on the early copy for token 0 */
    if
    :: d_index[r] == 0 && d_bound[r] != NOBODY -> d_index[r] = 1
    :: else
    fi
#endif
  }
}

/* S1: every token is computed from complete pages of its own request. */
inline emit(r) {
  d_step { d_up == UP && d_state[r] == DECODING && len(frames) < 2 ->
    i = 0;
    do
    :: i < NUM_CHUNKS -> assert(d_page[d_slot[r] * NUM_CHUNKS + i] == TAG(r, i)); i++
    :: else -> break
    od;
    i = 0;
    frames!r,d_placement[r],d_index[r],d_token[r];
    d_index[r]++;
    if
    :: d_index[r] == 2 -> d_bound[r] = NOBODY; leave(r)
    :: else
    fi;
    check_ownership() }
}

inline prefill_locally(r, token) {
  d_step { d_up == UP && d_state[r] == RECEIVING && (LOCAL_AT_ONCE || TRIES(r) >= MAX_TRIES) &&
    t_placement[r] == d_placement[r] && d_committed[r] == 0 && !IS_COPYING(r) &&
    (t_state[r] == PUBLISHED || CLAIMER_IS_LOST(r)) ->
    delete_task(r);
    i = 0;
    do
    :: i < NUM_CHUNKS -> d_page[d_slot[r] * NUM_CHUNKS + i] = TAG(r, i); i++
    :: else -> break
    od;
    i = 0;
    if
    :: d_bound[r] != NOBODY -> tell_prefill(d_bound[r], STALE, r, d_placement[r], d_try[r])
    :: else
    fi;
    d_bound[r] = NOBODY; d_try[r] = MAX_TRIES + 1; d_arrived[r] = ALL_CHUNKS; d_committed[r] = 1;
    if
    :: d_index[r] == 0 -> d_token[r] = token
    :: else
    fi }
}

/* The receiver: check, copy half, copy half, check. */
inline check_before_copy() {
  d_step { d_up == UP && c_phase == CHECK_BEFORE ->
    if
    :: REFERENCE_HOLDS -> c_phase = FIRST_HALF
    :: else -> miss(); stop_copy()
    fi;
    check_ownership() }
}

inline copy_first_half() {
  d_step { d_up == UP && c_phase == FIRST_HALF ->
    c_seen = p_page[c_source * NUM_CHUNKS + c_chunk]; c_phase = SECOND_HALF }
}

inline copy_second_half() {
  d_step { d_up == UP && c_phase == SECOND_HALF ->
    if
    :: p_page[c_source * NUM_CHUNKS + c_chunk] == c_seen -> d_page[c_slot * NUM_CHUNKS + c_chunk] = c_seen
    :: else -> d_page[c_slot * NUM_CHUNKS + c_chunk] = HALF
    fi;
    c_seen = 0; c_phase = CHECK_AFTER }
}

inline check_after_copy() {
  d_step { d_up == UP && c_phase == CHECK_AFTER ->
    if
    :: REFERENCE_HOLDS ->
       if
       :: IS_TRY(c_request, c_placement, c_try) -> d_arrived[c_request] = d_arrived[c_request] | (1 << c_chunk)
       :: else
       fi
    :: else -> miss()
    fi;
    stop_copy(); check_ownership() }
}

/* ---- faults ------------------------------------------------------------------------------------------------------------ */

inline kill_prefill(p, to_p) {
  d_step { (FAULT_KINDS & 1) && MAY(faults_left) && p_up[p] != DOWN ->
    faults_left--; p_up[p] = DOWN; forget_binding(p);
    do
    :: len(to_p) > 0 -> to_p?a,b,c,d
    :: else -> break
    od;
    a = 0; b = 0; c = 0; d = 0 }
}

/* A new epoch at the same address; pages and generations start again. */
inline restart_prefill(p) {
  d_step { p_up[p] == DOWN ->
    p_up[p] = UP; p_epoch[p]++; p_generation[p] = 0; p_author_epoch[p] = 0; i = 0;
    do
    :: i < NUM_CHUNKS -> p_page[p * NUM_CHUNKS + i] = HALF; i++
    :: else -> break
    od;
    i = 0 }
}

inline freeze_prefill(p) { d_step { (FAULT_KINDS & 2) && MAY(faults_left) && p_up[p] == UP -> faults_left--; p_up[p] = FROZEN } }
inline resume_prefill(p) { d_step { p_up[p] == FROZEN -> p_up[p] = UP } }

inline kill_decode() {
  d_step { (FAULT_KINDS & 4) && MAY(faults_left) && d_up != DOWN ->
    faults_left--; d_up = DOWN;
    do
    :: len(cancels) > 0 -> cancels?a,b
    :: else -> break
    od;
    do
    :: len(to_d_0) > 0 -> to_d_0?a,b,c,d,e,f,h
    :: else -> break
    od;
    do
    :: len(to_d_1) > 0 -> to_d_1?a,b,c,d,e,f,h
    :: else -> break
    od;
    a = 0; b = 0; c = 0; d = 0; e = 0; f = 0; h = 0;
    free_slot(0); d_tombstone[0] = 0;
#if NUM_REQUESTS == 2
    free_slot(1); d_tombstone[1] = 0;
#endif
    d_free = ALL_SLOTS; forget_job(); forget_copy();
    i = 0;
    do
    :: i < NUM_SLOTS * NUM_CHUNKS -> d_page[i] = HALF; i++
    :: else -> break
    od;
    i = 0 }
}

inline restart_decode() { d_step { d_up == DOWN -> d_up = UP; d_epoch++ } }
inline freeze_decode() { d_step { (FAULT_KINDS & 8) && MAY(faults_left) && d_up == UP -> faults_left--; d_up = FROZEN } }
inline resume_decode() { d_step { d_up == FROZEN -> d_up = UP } }

/* From here on nothing goes wrong any more: what should happen "eventually" must not need another fault. */
inline calm_down() { d_step { !is_calm && (faults_left > 0 || slowness_left > 0 || cancels_left > 0 || wipes_left > 0) -> is_calm = 1 } }

inline wipe_redis() {
  d_step { MAY(wipes_left) ->
    wipes_left--;
    do
    :: len(jobs) > 0 -> jobs?a,b,c,d,e
    :: else -> break
    od;
    a = 0; b = 0; c = 0; d = 0; e = 0;
    delete_task(0);
#if NUM_REQUESTS == 2
    delete_task(1)
#endif
  }
}

/* ---- the world ---------------------------------------------------------------------------------------------------------- */

#if NUM_REQUESTS == 2
#define EACH_REQUEST(step) :: step(0) :: step(1)
#define EACH_BINDING(step) :: step(0, 0) :: step(0, 1) :: step(1, 0) :: step(1, 1)
#define EACH_LOCAL(step) :: step(0, 0) :: step(0, OTHER_TOKEN) :: step(1, 0) :: step(1, OTHER_TOKEN)
#else
#define EACH_REQUEST(step) :: step(0)
#define EACH_BINDING(step) :: step(0, 0) :: step(1, 0)
#define EACH_LOCAL(step) :: step(0, 0) :: step(0, OTHER_TOKEN)
#endif
#define EACH_PREFILL(step) :: step(0) :: step(1)

active proctype world() {
  d_step {
    d_bound[0] = NOBODY;
#if NUM_REQUESTS == 2
    d_bound[1] = NOBODY
#endif
  }
  do
  EACH_REQUEST(place)
  EACH_REQUEST(client_leaves)
  EACH_REQUEST(lose_worker)
  EACH_REQUEST(lose_patience)
  EACH_REQUEST(miss_job)
  :: take_frame()
  :: take_early_copy()

  EACH_BINDING(claim)
  EACH_BINDING(claim_slow)
  EACH_REQUEST(delete_orphan)
  EACH_PREFILL(compute_half)
  :: announce(0, to_d_0)
  :: announce(1, to_d_1)
  :: sample(0, 0)
  :: sample(0, OTHER_TOKEN)
  :: sample(1, 0)
  :: sample(1, OTHER_TOKEN)
  EACH_PREFILL(send_early_copy)
  :: commit(0, to_d_0)
  :: commit(1, to_d_1)
  :: obey(0, to_p_0)
  :: obey(1, to_p_1)
  :: end_lease(0, to_d_0)
  :: end_lease(1, to_d_1)

  :: read_job()
  :: drop_job()
  :: supersede()
  :: take_in()
  :: take_cancel()
  :: take_announce(0, to_d_0)
  :: take_announce(1, to_d_1)
  :: take_commit(0, to_d_0)
  :: take_commit(1, to_d_1)
  EACH_REQUEST(start_decoding)
  EACH_REQUEST(emit)
  EACH_LOCAL(prefill_locally)
  EACH_REQUEST(republish)
  :: check_before_copy()
  :: copy_first_half()
  :: copy_second_half()
  :: check_after_copy()

  :: kill_prefill(0, to_p_0)
  :: kill_prefill(1, to_p_1)
  EACH_PREFILL(restart_prefill)
  EACH_PREFILL(freeze_prefill)
  EACH_PREFILL(resume_prefill)
  :: kill_decode()
  :: restart_decode()
  :: freeze_decode()
  :: calm_down()
  :: resume_decode()
#if WIPES > 0
  :: wipe_redis()
#endif
  :: timeout -> break
  od;
  skip;
  /* Nothing more can happen. L1: every request has ended. L2: nothing is held, nothing is left in Redis. */
  d_step {
    i = 0;
    do
    :: i < NUM_REQUESTS ->
       assert(g_state[i] == DONE || g_state[i] == FAILED || g_state[i] == CANCELLED);
       assert(g_state[i] != FAILED || faults_left < FAULTS || slowness_left < SLOWNESS || g_placement[i] == MAX_PLACEMENTS);
       assert(d_state[i] == IDLE); assert(t_state[i] == NO_TASK);
       i++
    :: else -> break
    od;
    assert(d_free == ALL_SLOTS); assert(c_phase == 0);
    assert(p_free[0] && p_free[1] && p_state[0] == IDLE && p_state[1] == IDLE);
    assert(len(jobs) == 0 && len(cancels) == 0 && len(frames) == 0 && len(early_copies) == 0);
    assert(len(to_d_0) == 0 && len(to_d_1) == 0 && len(to_p_0) == 0 && len(to_p_1) == 0);
    /* L3: a calm run wastes no pull. */
    assert(!has_missed || faults_left < FAULTS || slowness_left < SLOWNESS || CANCELS > cancels_left || WIPES > 0)
  }
}
