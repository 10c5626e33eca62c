/* Two requests with two choices each (n = 2) on one decode worker that may die.
 *
 * The choices of a request share its full prompt block; the last, partial one is copied for each, because each writes
 * its own tokens into it. A token is (request, choice, placement, index), and here its value is its choice. The prompt is
 * computed once, then the choices go their ways; a lost placement goes on with the choices that have not ended. The
 * answer that nobody waits for any more is longer than anything here, so it must be cancelled.
 */

#ifndef NUM_PAGES
#define NUM_PAGES 4
#endif
#ifndef FAULTS
#define FAULTS 0
#endif
#ifndef CANCELS
#define CANCELS 1
#endif
#ifndef MAX_FAILURES
#define MAX_FAILURES 3
#endif
#define LENGTH 2              /* tokens of a choice */
#define NO_PAGE 15

/* a request at the gateway */
#define TO_PLACE 0
#define PLACED 1
#define DONE 2
#define FAILED 3
#define CANCELLED 4
/* what a page holds */
#define NOTHING 0
#define PROMPT(r) (1 + (r))           /* full block of the prompt */
#define PART(r) (3 + (r))             /* the rest of the prompt */
#define OWN(x) (5 + (x))              /* the rest of the prompt, and token 0 of choice x */

byte faults_left = FAULTS, cancels_left = CANCELS;

bit is_calm;
#define MAY(budget) (budget > 0 && !is_calm)

/* choice c of request r is x = 2 * (r) + c */
byte g_state[2], g_placement[2], g_failures[2], g_shown[4];
bit has_job[2];
byte j_placement[2];
chan frames = [2] of { byte, byte, byte, byte };    /* choice x, placement, index, value */
byte cancel_to[2];                                  /* a cancel under way: of this placement and older ones */

bit d_up = 1, d_runs[4], d_has_prompt[2];
byte d_placement[2], d_tombstone[2], d_index[4], d_part[4] = NO_PAGE, d_full[4] = NO_PAGE;
byte p_owners[NUM_PAGES], p_content[NUM_PAGES];

byte a, b, c, d, i;           /* scratch of one step */

#define ENDS_HERE(r) (g_state[r] == PLACED && d_placement[r] == g_placement[r])
#define SIBLING(x) ((x) + 1 - 2 * ((x) % 2))
#define IS_LIVE(r) (d_runs[2 * (r)] || d_runs[2 * (r) + 1])
#define ENDED(x) (g_shown[x] == LENGTH)
#define NUM_OPEN(r) (!ENDED(2 * (r)) + !ENDED(2 * (r) + 1))

#ifdef RESERVE_LATE           /* pages of the copies are taken when the prompt is there */
#define PAGES_AT_ONCE(r) 2
#else
#define PAGES_AT_ONCE(r) (1 + NUM_OPEN(r))
#endif
#ifdef RESERVE_LATE
#define NUM_COPIES_MISSING(r) ((d_runs[2 * (r)] && d_part[2 * (r)] == NO_PAGE) + (d_runs[2 * (r) + 1] && d_part[2 * (r) + 1] == NO_PAGE))
#define HAS_COPIES(r) (num_free >= NUM_COPIES_MISSING(r))
#else
#define HAS_COPIES(r) true
#endif
#ifdef END_ON_FIRST           /* the request ends with its first choice */
#define ALL_ENDED(r) (ENDED(2 * (r)) || ENDED(2 * (r) + 1))
#else
#define ALL_ENDED(r) (ENDED(2 * (r)) && ENDED(2 * (r) + 1))
#endif
#ifdef RESTART_ENDED          /* a new placement has all choices */
#define IS_TO_RUN(x) true
#else
#define IS_TO_RUN(x) (!ENDED(x))
#endif
#ifdef COUNT_PER_CHOICE       /* each choice that was running costs a failure */
#define COST(r) NUM_OPEN(r)
#else
#define COST(r) 1
#endif
#ifdef NO_CHOICE_ID           /* frames name the request: the first choice that fits gets the token */
#define OWNER_OF(x, index) (g_shown[2 * ((x) / 2)] == index -> 2 * ((x) / 2) : 2 * ((x) / 2) + 1)
#else
#define OWNER_OF(x, index) (x)
#endif

/* ---- pages ----------------------------------------------------------------------------------------------------------- */

byte num_free = NUM_PAGES;

inline take_page(at) {
  i = 0;
  do
  :: p_owners[i] != 0 -> i++
  :: else -> break
  od;
  at = i; p_owners[i] = 1; i = 0; num_free--
}

inline release_page(at) {
  if
  :: at != NO_PAGE ->
     p_owners[at]--;
     if
     :: p_owners[at] == 0 -> p_content[at] = NOTHING; num_free++
     :: else
     fi;
     at = NO_PAGE
  :: else
  fi
}

inline end_choice(x) { d_runs[x] = 0; d_index[x] = 0; release_page(d_part[x]); release_page(d_full[x]) }

/* The placement is over once no choice runs. */
inline note_end(r) {
  if
  :: !IS_LIVE(r) ->
     if
     :: d_placement[r] > d_tombstone[r] -> d_tombstone[r] = d_placement[r]
     :: else
     fi;
     d_placement[r] = 0; d_has_prompt[r] = 0
  :: else
  fi
}

/* ---- gateway ----------------------------------------------------------------------------------------------------------- */

inline place(r) {
  d_step { g_state[r] == TO_PLACE && d_up ->
    g_state[r] = PLACED; g_placement[r]++; has_job[r] = 1; j_placement[r] = g_placement[r] }
}

inline lose_worker(r) {
  d_step { g_state[r] == PLACED && !d_up ->
    g_failures[r] = g_failures[r] + COST(r);
    if
    :: g_failures[r] >= MAX_FAILURES -> g_state[r] = FAILED
    :: else -> g_state[r] = TO_PLACE
    fi }
}

/* S2: each choice gets its own tokens, each once and in order. */
inline take_frame() {
  d_step { len(frames) > 0 ->
    frames?a,b,c,d;                                  /* choice, placement, index, value */
    a = OWNER_OF(a, c);
    if
    :: g_state[a / 2] == PLACED && b == g_placement[a / 2] ->
       assert(c == g_shown[a]);
       assert(d == a);
       g_shown[a]++;
       if
       :: ALL_ENDED(a / 2) ->
          g_state[a / 2] = DONE;
          assert(ENDED(a) && ENDED(SIBLING(a)))           /* E1: the request ends when all of its choices have ended */
       :: else
       fi
    :: else
    fi;
    a = 0; b = 0; c = 0; d = 0 }
}

inline client_leaves(r) {
  d_step { MAY(cancels_left) && g_state[r] < DONE ->
    cancels_left--; g_state[r] = CANCELLED;
    if
    :: d_up && g_placement[r] > 0 -> cancel_to[r] = g_placement[r]
    :: else
    fi }
}

/* ---- decode worker -------------------------------------------------------------------------------------------------------- */

inline drop_job(r) {
  d_step { d_up && has_job[r] && j_placement[r] <= d_tombstone[r] -> has_job[r] = 0; j_placement[r] = 0 }
}

inline start_choice(x) {
  if
  :: IS_TO_RUN(x) ->
     assert(g_shown[x] < LENGTH);                    /* E2: a choice that has ended is not computed again */
     d_runs[x] = 1; d_index[x] = g_shown[x];
     if
     :: d_full[SIBLING(x)] != NO_PAGE -> d_full[x] = d_full[SIBLING(x)]; p_owners[d_full[x]]++
     :: else -> take_page(d_full[x])
     fi;
     if
#ifdef SHARE_PARTIAL
     :: d_part[SIBLING(x)] != NO_PAGE -> d_part[x] = d_part[SIBLING(x)]; p_owners[d_part[x]]++
#endif
#ifdef RESERVE_LATE
     :: d_part[SIBLING(x)] != NO_PAGE
#endif
     :: else -> take_page(d_part[x])
     fi
  :: else
  fi
}

/* With pages for everything that the choices need until the prompt is computed and copied. */
inline take_in(r) {
  d_step { d_up && has_job[r] && j_placement[r] > d_tombstone[r] && !IS_LIVE(r) && num_free >= PAGES_AT_ONCE(r) ->
    d_placement[r] = j_placement[r]; has_job[r] = 0; j_placement[r] = 0;
    start_choice(2 * (r)); start_choice(2 * (r) + 1) }
}

inline write_part(x) {
  if
  :: d_runs[x] && d_index[x] == 0 -> p_content[d_part[x]] = PART((x) / 2)
  :: d_runs[x] && d_index[x] == 1 -> p_content[d_part[x]] = OWN(x)       /* shown before: computed again */
  :: else
  fi
}

inline compute_prompt(r) {
  d_step { d_up && IS_LIVE(r) && !d_has_prompt[r] && HAS_COPIES(r) ->
#ifdef RESERVE_LATE
    if
    :: d_runs[2 * (r)] && d_part[2 * (r)] == NO_PAGE -> take_page(d_part[2 * (r)])
    :: else
    fi;
    if
    :: d_runs[2 * (r) + 1] && d_part[2 * (r) + 1] == NO_PAGE -> take_page(d_part[2 * (r) + 1])
    :: else
    fi;
#endif
    d_has_prompt[r] = 1;
    if
    :: d_runs[2 * (r)] -> p_content[d_full[2 * (r)]] = PROMPT(r)
    :: else -> p_content[d_full[2 * (r) + 1]] = PROMPT(r)
    fi;
    write_part(2 * (r)); write_part(2 * (r) + 1) }
}

/* S1: token 0 comes from the prompt alone, the next one also from the choice's own token 0. */
inline emit(x) {
  d_step { d_up && d_runs[x] && d_has_prompt[(x) / 2] && len(frames) < 2 && (d_index[x] < LENGTH - 1 || ENDS_HERE((x) / 2)) ->
    assert(p_content[d_full[x]] == PROMPT((x) / 2));
    if
    :: d_index[x] == 0 -> assert(p_content[d_part[x]] == PART((x) / 2)); p_content[d_part[x]] = OWN(x)
    :: else -> assert(p_content[d_part[x]] == OWN(x))
    fi;
    frames!x,d_placement[(x) / 2],d_index[x],x;
    d_index[x]++;
    if
    :: d_index[x] == LENGTH -> end_choice(x); note_end((x) / 2)
    :: else
    fi }
}

inline take_cancel(r) {
  d_step { d_up && cancel_to[r] > 0 ->
    if
    :: cancel_to[r] > d_tombstone[r] -> d_tombstone[r] = cancel_to[r]
    :: else
    fi;
    if
    :: IS_LIVE(r) && d_placement[r] <= cancel_to[r] -> cancel_choices(r); note_end(r)
    :: else
    fi;
    cancel_to[r] = 0 }
}

inline cancel_choices(r) {
#ifdef CANCEL_ONE             /* only one choice hears of it, and the other one is stopped by nobody */
  if
  :: d_runs[2 * (r)] -> end_choice(2 * (r))
  :: else -> end_choice(2 * (r) + 1)
  fi
#else
  end_choice(2 * (r)); end_choice(2 * (r) + 1)
#endif
}

/* ---- faults ------------------------------------------------------------------------------------------------------------------ */

/* From here on nothing goes wrong any more: what should happen "eventually" must not need another fault. */
inline calm_down() { d_step { !is_calm && (faults_left > 0 || cancels_left > 0) -> is_calm = 1 } }

inline kill_worker() {
  d_step { MAY(faults_left) && d_up ->
    faults_left--; d_up = 0;
    do
    :: len(frames) > 0 -> frames?a,b,c,d
    :: else -> break
    od;
    a = 0; b = 0; c = 0; d = 0;
    end_choice(0); end_choice(1); end_choice(2); end_choice(3);
    note_end(0); note_end(1);
    d_tombstone[0] = 0; d_tombstone[1] = 0; cancel_to[0] = 0; cancel_to[1] = 0;
    has_job[0] = 0; has_job[1] = 0; j_placement[0] = 0; j_placement[1] = 0 }
}

inline restart_worker() { d_step { !d_up && g_state[0] != PLACED && g_state[1] != PLACED -> d_up = 1 } }

#define EACH_REQUEST(step) :: step(0) :: step(1)

active proctype world() {
  do
  EACH_REQUEST(place)
  EACH_REQUEST(lose_worker)
  EACH_REQUEST(client_leaves)
  :: take_frame()
  EACH_REQUEST(drop_job)
  EACH_REQUEST(take_in)
  EACH_REQUEST(compute_prompt)
  :: emit(0)
  :: emit(1)
  :: emit(2)
  :: emit(3)
  EACH_REQUEST(take_cancel)
  :: kill_worker()
  :: calm_down()
  :: restart_worker()
  :: timeout -> break
  od;
  skip;
  /* Nothing more can happen. L1: both requests have ended. L2: no page is owned. F1: no failure but by the budget. */
  d_step {
    assert(g_state[0] >= DONE && g_state[1] >= DONE);
    assert((g_state[0] != FAILED && g_state[1] != FAILED) || FAULTS - faults_left >= MAX_FAILURES);
    assert(!IS_LIVE(0) && !IS_LIVE(1));
    assert(num_free == NUM_PAGES)
  }
}
