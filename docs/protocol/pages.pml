/* One pool of pages with its prefix cache: sequences that share a prefix, are received, preempted, cancelled and fail,
 * and a peer that pulls.
 *
 * A prompt is two blocks: the first one full (it may be shared and cached), the second one its own. A second token needs
 * a third block, so that an older sequence preempts a younger one. The last sequence of three has a prefix of its own.
 * The engine takes pages only between steps; cancels and copies come at any time.
 *
 * Follows common/cache/pool.py and prefix.py, common/scheduling/blocks.py and decode_worker/scheduler.py and core.py.
 * What a page holds is modelled, not only who owns it.
 */

#ifndef NUM_SEQUENCES
#define NUM_SEQUENCES 2
#endif
#ifndef NUM_PAGES
#define NUM_PAGES 3
#endif
#ifndef REMOTE
#define REMOTE 0              /* set of sequences whose prompt is received */
#endif
#ifndef CANCELS
#define CANCELS 1
#endif
#ifndef BAD_STEPS
#define BAD_STEPS 0           /* computed blocks that make the logits invalid */
#endif
#ifndef BAD_COPIES
#define BAD_COPIES 0          /* copies whose source has changed */
#endif
#ifndef PULLS
#define PULLS 0               /* pages that a peer pulls from this pool */
#endif

#define NO_PAGE 15
/* what a page holds; complete blocks are BLOCK(sequence, index) */
#define NOTHING 0
#define HALF 1
#define WRONG 2               /* a copy of a changed source */
#define BAD 3                 /* computed, but worthless */
#define PREFIX(s) (s == 2)    /* which prefix a sequence has */
#define BLOCK(s, index) ((index) == 0 -> 4 + PREFIX(s) : 6 + 3 * (index) + (s))
/* a sequence */
#define WAITING 0
#define RESERVED 1
#define RUNNING 2
#define DONE 3
#define FAILED 4
#define CANCELLED 5

byte cancels_left = CANCELS, bad_steps_left = BAD_STEPS, bad_copies_left = BAD_COPIES, pulls_left = PULLS;

bit is_calm;
#define MAY(budget) (budget > 0 && !is_calm)

/* pool and prefix cache: p_key is the prefix (plus 1) under which the page is cached, 0: none */
byte p_owners[NUM_PAGES], p_key[NUM_PAGES], p_content[NUM_PAGES], p_generation[NUM_PAGES];
bit p_suspect[NUM_PAGES];     /* ghost: computed by a sequence that has failed since */

byte s_state[NUM_SEQUENCES], s_computed[NUM_SEQUENCES], s_tokens[NUM_SEQUENCES], s_shown[NUM_SEQUENCES];
byte s_page[NUM_SEQUENCES * 3] = NO_PAGE;
bit s_local[NUM_SEQUENCES], s_is_bad[NUM_SEQUENCES];

/* the step under way: it computes the next block of a sequence */
byte step_of = NO_PAGE, step_page = NO_PAGE;

/* receptions: the pages being written, and how far */
bit c_runs[NUM_SEQUENCES], c_failed[NUM_SEQUENCES];
byte c_page[NUM_SEQUENCES * 2] = NO_PAGE, c_written[NUM_SEQUENCES];   /* halves written */

/* the peer's pull: check, half, half, check */
byte r_phase, r_page, r_generation, r_wanted, r_seen;

byte i, j, found;             /* scratch of one step */
bit fits;

#define IS_REMOTE(s) ((REMOTE & (1 << s)) && !s_local[s])
#define IS_IDLE (step_of == NO_PAGE)
#define IS_BAD(s) (p_content[s_page[3 * s]] == BAD || p_content[s_page[3 * s + 1]] == BAD)

#ifdef HIT_UNPINNED           /* the cached prefix gets its owner only after the missing pages are taken */
#define PINS_FIRST false
#else
#define PINS_FIRST true
#endif
#ifdef TAKE_DURING_STEP       /* pages are taken while a step computes */
#define MAY_TAKE true
#else
#define MAY_TAKE IS_IDLE
#endif
#ifdef PREEMPT_RESERVED       /* a sequence that is being received may be preempted */
#define MAY_LOSE_PAGES(s) (s_state[s] == RUNNING || s_state[s] == RESERVED)
#else
#define MAY_LOSE_PAGES(s) (s_state[s] == RUNNING)
#endif

/* ---- pool ------------------------------------------------------------------------------------------------------------ */

/* The generation first: whoever takes the page next must find the new one. */
inline free_page(p) { p_generation[p]++; p_content[p] = NOTHING; p_suspect[p] = 0 }

inline release_page(p) {
#ifdef RELEASE_FREES          /* one owner's release frees the page for all */
  p_owners[p] = 0;
#else
  p_owners[p]--;
#endif
  if
  :: p_owners[p] == 0 && p_key[p] == 0 -> free_page(p)
  :: else
  fi
}

/* Take a page: a free one, else the first cached one without an owner. */
inline take_page(at) {
  found = NO_PAGE; i = 0;
  do
  :: i < NUM_PAGES ->
     if
     :: p_owners[i] == 0 && p_key[i] == 0 -> found = i; break
     :: p_owners[i] == 0 && p_key[i] != 0 && found == NO_PAGE -> found = i
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0;
  if
  :: found != NO_PAGE && p_key[found] != 0 ->
     p_key[found] = 0;
#ifndef EVICT_SAME_GEN
     p_generation[found]++;
#endif
     p_content[found] = NOTHING; p_suspect[found] = 0
  :: else
  fi;
  if
  :: found != NO_PAGE -> p_owners[found] = 1
  :: else
  fi;
  at = found; found = 0
}

inline count_free() {
  j = 0; i = 0;
  do
  :: i < NUM_PAGES ->
     if
     :: p_owners[i] == 0 -> j++
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0
}

/* Cache the first block under its prefix, unless that is cached already. */
inline publish(s) {
  found = 0; i = 0;
  do
  :: i < NUM_PAGES ->
     if
     :: p_key[i] == PREFIX(s) + 1 -> found = 1
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0;
  if
  :: !found && p_key[s_page[3 * s]] == 0 -> p_key[s_page[3 * s]] = PREFIX(s) + 1
  :: else
  fi;
  found = 0
}

/* P1: a hit is complete and verified, and not of a request that has failed. */
inline match(s) {
  i = 0;
  do
  :: i < NUM_PAGES ->
     if
     :: p_key[i] == PREFIX(s) + 1 ->
        assert(p_content[i] == BLOCK(s, 0) || (p_content[i] == BAD && !p_suspect[i]));
        s_page[3 * s] = i; s_computed[s] = 1;
        if
        :: PINS_FIRST -> p_owners[i]++
        :: else
        fi;
        break
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0
}

/* Let go of every page; the sequence keeps its tokens. */
inline release_pages(s) {
  j = 0;
  do
  :: j < 3 ->
     if
     :: s_page[3 * s + 2 - j] != NO_PAGE -> release_page(s_page[3 * s + 2 - j]); s_page[3 * s + 2 - j] = NO_PAGE
     :: else
     fi;
     j++
  :: else -> break
  od;
  j = 0; s_computed[s] = 0
}

inline leave(s, state) { release_pages(s); s_state[s] = state; s_tokens[s] = 0; s_shown[s] = 0; s_local[s] = 0 }

/* S3: a page has as many owners as sequences and receptions know it. */
inline check_owners() {
#ifndef FREE_DST
  i = 0;
  do
  :: i < NUM_PAGES ->
     found = 0; j = 0;
     do
     :: j < 3 * NUM_SEQUENCES ->
        if
        :: s_page[j] == i -> found++
        :: else
        fi;
        j++
     :: else -> break
     od;
     j = 0;
     do
     :: j < 2 * NUM_SEQUENCES ->
        if
        :: c_page[j] == i -> found++
        :: else
        fi;
        j++
     :: else -> break
     od;
     assert(p_owners[i] == found);
     i++
  :: else -> break
  od;
  i = 0; j = 0; found = 0
#else
  skip
#endif
}

/* ---- scheduler -------------------------------------------------------------------------------------------------------- */

/* Cached prefix and missing pages, or nothing. */
inline admit(s) {
  d_step { MAY_TAKE && s_state[s] == WAITING ->
    match(s);
    count_free();
    fits = (j + s_computed[s] >= 2);
    j = 0;
    if
    :: fits ->
       if
       :: s_computed[s] == 0 -> take_page(s_page[3 * s])
       :: else
       fi;
       take_page(s_page[3 * s + 1]);
       if
       :: !PINS_FIRST && s_computed[s] == 1 -> p_owners[s_page[3 * s]]++
       :: else
       fi;
       if
       :: IS_REMOTE(s) -> s_state[s] = RESERVED; lend(s)
       :: else -> s_state[s] = RUNNING
       fi
    :: !fits && PINS_FIRST -> release_pages(s)
    :: !fits && !PINS_FIRST -> s_page[3 * s] = NO_PAGE; s_computed[s] = 0
    fi;
    fits = 0;
    check_owners() }
}

/* The receiver owns the missing pages, too. */
inline lend(s) {
  c_runs[s] = 1; c_failed[s] = 0; c_written[s] = 0;
  if
  :: s_computed[s] == 0 -> c_page[2 * s] = s_page[3 * s]; own(c_page[2 * s])
  :: else -> c_written[s] = 2
  fi;
  c_page[2 * s + 1] = s_page[3 * s + 1]; own(c_page[2 * s + 1]);
#ifdef PUBLISH_RESERVED       /* the prefix is cached as soon as its page is reserved */
  publish(s)
#endif
}

#ifdef FREE_DST               /* a running copy owns nothing */
inline own(p) { skip }
inline disown(p) { skip }
#else
inline own(p) { p_owners[p]++ }
inline disown(p) { release_page(p) }
#endif

/* Run: the next block is being written; settle: it is complete. The last block of the prompt samples a token. */
inline run_step(s) {
  d_step { IS_IDLE && s_state[s] == RUNNING && s_computed[s] < 2 ->
    step_of = s; step_page = s_page[3 * s + s_computed[s]]; p_content[step_page] = HALF }
}

inline settle(s, goes_bad) {
  d_step { step_of == s && (!goes_bad || (MAY(bad_steps_left) && s_state[s] == RUNNING)) ->
    if
    :: goes_bad -> bad_steps_left--
    :: else
    fi;
    if
    :: s_state[s] == RUNNING && s_page[3 * s + s_computed[s]] == step_page ->
       if
       :: goes_bad -> p_content[step_page] = BAD
       :: else -> p_content[step_page] = BLOCK(s, s_computed[s])
       fi;
       s_computed[s]++;
       if
       :: s_computed[s] == 1 -> publish(s)
       :: s_computed[s] == 2 && IS_BAD(s) -> fail(s)
       :: else
       fi
    :: else ->                /* cancelled while the step ran: it has written all the same */
       p_content[step_page] = WRONG
    fi;
    step_of = NO_PAGE; step_page = NO_PAGE;
    check_owners() }
}

/* Invalid logits: its blocks leave the cache, its neighbours stay. */
inline fail(s) {
  j = 0;
  do
  :: j < 2 ->
     p_suspect[s_page[3 * s + j]] = 1;
#ifndef NO_FORGET
     p_key[s_page[3 * s + j]] = 0;
#endif
     j++
  :: else -> break
  od;
  j = 0;
  leave(s, FAILED)
}

/* S1: a token is computed from the sequence's own complete blocks, or there is none (invalid logits: it has hit a bad
 * block before that was noticed). S2: it is the next one that its client lacks. */
inline emit(s) {
  d_step { IS_IDLE && s_state[s] == RUNNING && s_computed[s] == 2 && (s_tokens[s] == 0 || s_page[3 * s + 2] != NO_PAGE) ->
    if
    :: IS_BAD(s) -> fail(s)
    :: else ->
       assert(p_content[s_page[3 * s]] == BLOCK(s, 0));
       assert(p_content[s_page[3 * s + 1]] == BLOCK(s, 1));
       assert(s_tokens[s] == s_shown[s]);
       s_tokens[s]++; s_shown[s]++;
       if
       :: s_tokens[s] == 2 -> leave(s, DONE)
       :: else
       fi
    fi;
    check_owners() }
}

/* The page of the second token: from the youngest other sequence if need be. Lower numbers are older. */
inline grow(s) {
  d_step { MAY_TAKE && s_state[s] == RUNNING && s_computed[s] == 2 && s_tokens[s] == 1 && s_page[3 * s + 2] == NO_PAGE ->
    take_page(s_page[3 * s + 2]);
#if NUM_SEQUENCES == 3
    if
    :: s_page[3 * s + 2] == NO_PAGE && s < 2 && MAY_LOSE_PAGES(2) -> preempt(2); take_page(s_page[3 * s + 2])
    :: else
    fi;
#endif
    if
    :: s_page[3 * s + 2] == NO_PAGE && s < 1 && MAY_LOSE_PAGES(1) -> preempt(1); take_page(s_page[3 * s + 2])
    :: else
    fi;
    check_owners() }
}

inline preempt(s) {
  release_pages(s);
  s_state[s] = WAITING;
#ifdef DROP_TOKENS            /* a preempted sequence starts again from its prompt */
  s_tokens[s] = 0;
#endif
#ifndef PREEMPT_RESERVED
  s_local[s] = 1
#endif
}

/* From here on nothing goes wrong any more: what should happen "eventually" must not need another fault. */
inline calm_down() { d_step { !is_calm && (cancels_left > 0 || bad_steps_left > 0 || bad_copies_left > 0 || pulls_left > 0) -> is_calm = 1 } }

inline cancel(s) {
  d_step { MAY(cancels_left) && s_state[s] < DONE -> cancels_left--; leave(s, CANCELLED); check_owners() }
}

/* ---- receptions --------------------------------------------------------------------------------------------------------- */

/* Four halves: of the first page (unless it was cached) and of the second. */
inline write_half(s, goes_bad) {
  d_step { c_runs[s] && c_written[s] < 4 && (!goes_bad || MAY(bad_copies_left)) ->
    j = c_page[2 * s + c_written[s] / 2];
    if
    :: goes_bad -> bad_copies_left--; c_failed[s] = 1; p_content[j] = WRONG
    :: !goes_bad && c_written[s] % 2 == 0 -> p_content[j] = HALF
    :: !goes_bad && c_written[s] % 2 == 1 && p_content[j] == HALF -> p_content[j] = BLOCK(s, c_written[s] / 2)
    :: else
    fi;
    j = 0;
    c_written[s]++;
#ifdef PUBLISH_UNVERIFIED     /* a page is cached when it has arrived, before the reference is checked again */
    if
    :: c_written[s] == 2 && s_state[s] == RESERVED -> publish(s)
    :: else
    fi
#endif
  }
}

inline let_go(s) {
  c_runs[s] = 0; c_written[s] = 0; c_failed[s] = 0;
  if
  :: c_page[2 * s] != NO_PAGE -> disown(c_page[2 * s])
  :: else
  fi;
  disown(c_page[2 * s + 1]);
  c_page[2 * s] = NO_PAGE; c_page[2 * s + 1] = NO_PAGE
}

/* All pages are here and verified: it runs. Else it computes its prompt itself, in the pages it has. */
inline end_reception(s) {
  d_step { c_runs[s] && c_written[s] == 4 ->
    if
    :: s_state[s] == RESERVED && !c_failed[s] -> s_state[s] = RUNNING; s_computed[s] = 2; publish(s)
    :: s_state[s] == RESERVED && c_failed[s] -> s_state[s] = RUNNING; s_local[s] = 1
    :: else
    fi;
    let_go(s);
    check_owners() }
}

/* Dropped: it stops when the copy at hand has ended. */
inline stop_reception(s) { d_step { c_runs[s] && s_state[s] >= DONE -> let_go(s); check_owners() } }

/* ---- a peer's pull -------------------------------------------------------------------------------------------------------- */

inline begin_pull(s) {
  d_step { MAY(pulls_left) && r_phase == 0 && s_state[s] == RUNNING && s_computed[s] >= 1 && p_content[s_page[3 * s]] == BLOCK(s, 0) ->
    pulls_left--;
    r_phase = 1; r_page = s_page[3 * s]; r_generation = p_generation[r_page]; r_wanted = p_content[r_page] }
}

inline end_pull() { r_phase = 0; r_page = 0; r_generation = 0; r_wanted = 0; r_seen = 0 }

/* S1 again: what is taken for good is what was announced. */
inline pull() {
  d_step { r_phase > 0 ->
    if
    :: r_phase == 1 && p_generation[r_page] == r_generation -> r_phase = 2
    :: r_phase == 2 -> r_seen = p_content[r_page]; r_phase = 3
    :: r_phase == 3 ->
       if
       :: p_content[r_page] != r_seen -> r_seen = HALF
       :: else
       fi;
       r_phase = 4
    :: r_phase == 4 && p_generation[r_page] == r_generation -> assert(r_seen == r_wanted); end_pull()
    :: else -> end_pull()
    fi }
}

#if NUM_SEQUENCES == 3
#define EACH_SEQUENCE(step) :: step(0) :: step(1) :: step(2)
#define EACH_RESULT(step) :: step(0, 0) :: step(0, 1) :: step(1, 0) :: step(1, 1) :: step(2, 0) :: step(2, 1)
#else
#define EACH_SEQUENCE(step) :: step(0) :: step(1)
#define EACH_RESULT(step) :: step(0, 0) :: step(0, 1) :: step(1, 0) :: step(1, 1)
#endif

active proctype world() {
  do
  EACH_SEQUENCE(admit)
  EACH_SEQUENCE(run_step)
  EACH_RESULT(settle)
  EACH_SEQUENCE(emit)
  EACH_SEQUENCE(grow)
  EACH_SEQUENCE(cancel)
  EACH_RESULT(write_half)
  EACH_SEQUENCE(end_reception)
  EACH_SEQUENCE(stop_reception)
  EACH_SEQUENCE(begin_pull)
  :: pull()
  :: calm_down()
  :: timeout -> break
  od;
  skip;
  /* Nothing more can happen. L1: every sequence has ended. L2: nobody owns a page. */
  d_step {
    i = 0;
    do
    :: i < NUM_SEQUENCES -> assert(s_state[i] >= DONE && !c_runs[i]); i++
    :: else -> break
    od;
    assert(IS_IDLE && r_phase == 0);
    i = 0;
    do
    :: i < NUM_PAGES -> assert(p_owners[i] == 0); i++
    :: else -> break
    od
  }
}
