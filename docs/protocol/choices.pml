/* Two requests with two choices each (n = 2) on one decode worker that may die.
 *
 * The first choice of a request leads: its prompt is computed, the other choice follows without pages. Then it shares the
 * full prompt block, and the last, partial one is copied for it, because each writes its own tokens into it; where the
 * leader is over by then, it computes the prompt again. A token is (request, choice, placement, index), and here its value
 * is its choice. A lost placement goes on with the choices that have not ended. Clients leave, or have enough of one
 * choice. The answer that nobody waits for any more is longer than anything here, so it must be cancelled.
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
#ifndef ENOUGHS               /* choices that their clients have enough of */
#define ENOUGHS 0
#endif
#ifndef BREAKS                /* choices that cannot go on, wherever they are computed */
#define BREAKS 0
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
#define BROKEN 5
/* what a page holds */
#define NOTHING 0
#define PROMPT(r) (1 + (r))           /* full block of the prompt */
#define PART(r) (3 + (r))             /* the rest of the prompt */
#define OWN(x) (5 + (x))              /* the rest of the prompt, and token 0 of choice x */
/* a frame that has no token: the placement is over */
#define FAILURE 15

byte faults_left = FAULTS, cancels_left = CANCELS, enoughs_left = ENOUGHS, breaks_left = BREAKS;

bit is_calm;
#define MAY(budget) (budget > 0 && !is_calm)

/* choice c of request r is x = 2 * (r) + c */
byte g_state[2], g_placement[2], g_failures[2], g_shown[4];
bit g_has_enough[4], has_job[2], j_wants[4];
byte j_placement[2];
chan frames = [2] of { byte, byte, byte, byte };    /* choice x, placement, index, value */
byte cancel_to[2];                                  /* a cancel under way: of this placement and older ones */
byte enough_to[4];                                  /* a cancel of one choice under way: of this very placement */

bit d_up = 1, d_runs[4], d_has_prompt[2], d_older;  /* d_older: which of the requests, if both are here, came first */
byte d_placement[2], d_tombstone[2], d_unwanted[4], d_index[4], d_part[4] = NO_PAGE, d_full[4] = NO_PAGE;
byte p_owners[NUM_PAGES], p_content[NUM_PAGES];

byte a, b, c, d, i;           /* scratch of one step */

#define SIBLING(x) ((x) + 1 - 2 * ((x) % 2))
#define ENDS_HERE(x) (g_state[(x) / 2] == PLACED && d_placement[(x) / 2] == g_placement[(x) / 2] && !g_has_enough[x])
#define IS_LIVE(r) (d_runs[2 * (r)] || d_runs[2 * (r) + 1])
#define ENDED(x) (g_shown[x] == LENGTH || g_has_enough[x])

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
#define COST(r) (!ENDED(2 * (r)) + !ENDED(2 * (r) + 1))
#else
#define COST(r) 1
#endif
#ifdef NO_CHOICE_ID           /* frames name the request: the first choice that fits gets the token */
#define OWNER_OF(x, index) (g_shown[2 * ((x) / 2)] == index -> 2 * ((x) / 2) : 2 * ((x) / 2) + 1)
#else
#define OWNER_OF(x, index) (x)
#endif

/* ---- who waits for what on the worker -------------------------------------------------------------------------------- */

#define HAS_PAGES(x) (d_part[x] != NO_PAGE)
#ifdef NO_HEIR                /* the first choice of the job leads, here or not */
bit d_has_leader[2];
#define LEADS(x) (d_runs[x] && (x) % 2 != d_has_leader[(x) / 2])
#else
#define LEADS(x) (d_runs[x] && ((x) % 2 == 0 || !d_runs[SIBLING(x)]))
#endif
#ifdef FOLLOW_EARLY           /* nobody waits for the prompt */
#define FOLLOWS(x) false
#else
#define FOLLOWS(x) (d_runs[x] && !HAS_PAGES(x) && !d_has_prompt[(x) / 2] && !LEADS(x))
#endif
#define IN_LINE(x) (d_runs[x] && !HAS_PAGES(x) && !FOLLOWS(x))
#define HAS_LINE(r) (IN_LINE(2 * (r)) || IN_LINE(2 * (r) + 1))
#define IS_YOUNGER(r) (IS_LIVE(1 - (r)) && d_older != (r))
#define IS_AT_HEAD(x) (!((x) % 2 && IN_LINE(SIBLING(x))) && !(IS_YOUNGER((x) / 2) && HAS_LINE(1 - (x) / 2)))
#define NUM_FOLLOWING(r) (FOLLOWS(2 * (r)) + FOLLOWS(2 * (r) + 1))

#ifdef RESERVE_LATE           /* pages of those that follow are looked for when the prompt is there */
#define NUM_PROMISED(r) 0
#else                         /* own ones, and those of an older request whose leader has its pages */
#define NUM_KEPT(r) (HAS_PAGES(2 * (r)) || HAS_PAGES(2 * (r) + 1) -> NUM_FOLLOWING(r) : 0)
#define NUM_PROMISED(r) (NUM_FOLLOWING(r) + (IS_YOUNGER(r) -> NUM_KEPT(1 - (r)) : 0))
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

#ifdef COPY_LATE              /* the source of a copy is not looked at before a later step */
byte d_source[4] = NO_PAGE;
#define IS_COPIED(x) (d_source[x] == NO_PAGE)
#define forget_copy(x) d_source[x] = NO_PAGE
#else
#define IS_COPIED(x) true
#define forget_copy(x) skip
#endif

inline end_choice(x) {
  d_runs[x] = 0; d_index[x] = 0; forget_copy(x); release_page(d_part[x]); release_page(d_full[x])
}

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
    g_state[r] = PLACED; g_placement[r]++; has_job[r] = 1; j_placement[r] = g_placement[r];
    j_wants[2 * (r)] = IS_TO_RUN(2 * (r)); j_wants[2 * (r) + 1] = IS_TO_RUN(2 * (r) + 1) }
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
    if
    :: g_state[a / 2] != PLACED || b != g_placement[a / 2]
    :: else ->
       if
       :: c == FAILURE -> g_state[a / 2] = BROKEN
       :: else -> take_token()
       fi
    fi;
    a = 0; b = 0; c = 0; d = 0 }
}

inline take_token() {
  a = OWNER_OF(a, c);
  if
  :: g_has_enough[a]
  :: else ->
     assert(c == g_shown[a]);
     assert(d == a);
     g_shown[a]++;
     if
     :: ALL_ENDED(a / 2) ->
        g_state[a / 2] = DONE;
        assert(ENDED(a) && ENDED(SIBLING(a)))           /* E1: the request ends when all of its choices have ended */
     :: else
     fi
  fi
}

inline client_leaves(r) {
  d_step { MAY(cancels_left) && g_state[r] < DONE ->
    cancels_left--; g_state[r] = CANCELLED;
    if
    :: d_up && g_placement[r] > 0 -> cancel_to[r] = g_placement[r]
    :: else
    fi }
}

/* The client of one choice has what it looked for. */
inline has_enough(x) {
  d_step { MAY(enoughs_left) && g_state[(x) / 2] < DONE && !ENDED(x) ->
    enoughs_left--; g_has_enough[x] = 1;
    if
    :: d_up && g_state[(x) / 2] == PLACED -> enough_to[x] = g_placement[(x) / 2]
    :: else
    fi;
    if
    :: ALL_ENDED((x) / 2) -> g_state[(x) / 2] = DONE
    :: else
    fi }
}

/* ---- decode worker -------------------------------------------------------------------------------------------------------- */

inline drop_job(r) {
  d_step { d_up && has_job[r] && j_placement[r] <= d_tombstone[r] -> forget_job(r) }
}

inline forget_job(r) { has_job[r] = 0; j_placement[r] = 0; j_wants[2 * (r)] = 0; j_wants[2 * (r) + 1] = 0 }

inline start_choice(x) {
  if
  :: j_wants[x] && d_unwanted[x] != j_placement[(x) / 2] ->
     assert(g_shown[x] < LENGTH);                    /* E2: a choice that has ended is not computed again */
     d_runs[x] = 1; d_index[x] = g_shown[x]
  :: else
  fi;
  d_unwanted[x] = 0
}

inline take_in(r) {
  d_step { d_up && has_job[r] && j_placement[r] > d_tombstone[r] && !IS_LIVE(r) ->
    d_placement[r] = j_placement[r];
    d_older = (IS_LIVE(1 - (r)) -> 1 - (r) : (r));
    start_choice(2 * (r)); start_choice(2 * (r) + 1);
#ifdef NO_HEIR
    d_has_leader[r] = d_runs[2 * (r)];
#endif
    forget_job(r);
    note_end(r) }
}

inline write_part(x) { p_content[d_part[x]] = (d_index[x] == 0 -> PART((x) / 2) : OWN(x)) }   /* also what was shown */

/* With pages for all that it has to compute, leaving those that are promised. Nobody overtakes the head of the line. */
inline admit_leader(x) {
  d_step { d_up && IN_LINE(x) && !d_has_prompt[(x) / 2] && LEADS(x) && IS_AT_HEAD(x) &&
           num_free >= 2 + NUM_PROMISED((x) / 2) ->
    take_page(d_full[x]); take_page(d_part[x]) }
}

inline compute_prompt(x) {
  d_step { d_up && LEADS(x) && HAS_PAGES(x) && !d_has_prompt[(x) / 2] ->
    p_content[d_full[x]] = PROMPT((x) / 2);
    write_part(x);
    /* L4: those that follow go on at once, unless older ones take what is there. */
    assert(IS_YOUNGER((x) / 2) || num_free >= NUM_FOLLOWING((x) / 2));
    d_has_prompt[(x) / 2] = 1 }
}

#ifdef FOLLOW_EARLY
#define MAY_JOIN(x) (d_has_prompt[(x) / 2] || HAS_PAGES(SIBLING(x)))
#else
#define MAY_JOIN(x) d_has_prompt[(x) / 2]
#endif

/* The leader is here: its full block is shared, what the prompt has left in the next one is copied. */
inline branch(x) {
  d_step { d_up && IN_LINE(x) && MAY_JOIN(x) && HAS_PAGES(SIBLING(x)) && IS_AT_HEAD(x) &&
           num_free >= 1 + NUM_PROMISED((x) / 2) ->
    d_full[x] = d_full[SIBLING(x)]; p_owners[d_full[x]]++;
#ifdef SHARE_PARTIAL
    d_part[x] = d_part[SIBLING(x)]; p_owners[d_part[x]]++
#else
    take_page(d_part[x]);
#ifdef COPY_LATE
    d_source[x] = d_part[SIBLING(x)]
#else
    copy_part(x, d_part[SIBLING(x)])
#endif
#endif
  }
}

inline copy_part(x, source) {
  if
  :: p_content[source] == PART((x) / 2) || p_content[source] == OWN(SIBLING(x)) -> write_part(x)
  :: else -> p_content[d_part[x]] = p_content[source]
  fi
}

#ifdef COPY_LATE
inline copy(x) { d_step { d_up && d_source[x] != NO_PAGE -> copy_part(x, d_source[x]); d_source[x] = NO_PAGE } }
#else
inline copy(x) { d_step { false -> skip } }
#endif

/* The leader is over: the prompt is computed again. */
inline join_alone(x) {
  d_step { d_up && IN_LINE(x) && d_has_prompt[(x) / 2] && !HAS_PAGES(SIBLING(x)) && IS_AT_HEAD(x) &&
           num_free >= 2 + NUM_PROMISED((x) / 2) ->
    take_page(d_full[x]); take_page(d_part[x]);
    p_content[d_full[x]] = PROMPT((x) / 2); write_part(x) }
}

/* S1: token 0 comes from the prompt alone, the next one also from the choice's own token 0. */
inline emit(x) {
  d_step { d_up && HAS_PAGES(x) && d_has_prompt[(x) / 2] && IS_COPIED(x) && len(frames) < 2 &&
           (d_index[x] < LENGTH - 1 || ENDS_HERE(x)) ->
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

/* A choice cannot go on: its request has failed, and the other choice is of no use. */
inline break_down(x) {
  d_step { MAY(breaks_left) && d_up && HAS_PAGES(x) && d_has_prompt[(x) / 2] && len(frames) < 2 ->
    breaks_left--;
    frames!x,d_placement[(x) / 2],FAILURE,0;
#ifdef FAIL_ALONE
    end_choice(x);
#else
    end_choice(x); end_choice(SIBLING(x));
#endif
    note_end((x) / 2) }
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

inline take_enough(x) {
  d_step { d_up && enough_to[x] > 0 ->
    if
    :: IS_LIVE((x) / 2) && d_placement[(x) / 2] == enough_to[x] ->
       end_choice(x);
#ifdef ENOUGH_IS_ALL          /* a choice that is cancelled ends the other one, too */
       end_choice(SIBLING(x));
#endif
       note_end((x) / 2)
    :: else ->
#ifndef FORGET_UNWANTED       /* the job may still come */
       d_unwanted[x] = enough_to[x]
#endif
    fi;
    enough_to[x] = 0 }
}

/* ---- faults ------------------------------------------------------------------------------------------------------------------ */

/* From here on nothing goes wrong any more: what should happen "eventually" must not need another fault. */
inline calm_down() {
  d_step { !is_calm && (faults_left > 0 || cancels_left > 0 || enoughs_left > 0 || breaks_left > 0) -> is_calm = 1 }
}

inline forget_worker(r) {
  end_choice(2 * (r)); end_choice(2 * (r) + 1); note_end(r);
  d_tombstone[r] = 0; d_unwanted[2 * (r)] = 0; d_unwanted[2 * (r) + 1] = 0;
  cancel_to[r] = 0; enough_to[2 * (r)] = 0; enough_to[2 * (r) + 1] = 0;
  forget_job(r)
}

inline kill_worker() {
  d_step { MAY(faults_left) && d_up ->
    faults_left--; d_up = 0; d_older = 0;
    do
    :: len(frames) > 0 -> frames?a,b,c,d
    :: else -> break
    od;
    a = 0; b = 0; c = 0; d = 0;
    forget_worker(0); forget_worker(1) }
}

inline restart_worker() { d_step { !d_up && g_state[0] != PLACED && g_state[1] != PLACED -> d_up = 1 } }

#define EACH_REQUEST(step) :: step(0) :: step(1)
#define EACH_CHOICE(step) :: step(0) :: step(1) :: step(2) :: step(3)

active proctype world() {
  do
  EACH_REQUEST(place)
  EACH_REQUEST(lose_worker)
  EACH_REQUEST(client_leaves)
  EACH_CHOICE(has_enough)
  :: take_frame()
  EACH_REQUEST(drop_job)
  EACH_REQUEST(take_in)
  EACH_CHOICE(admit_leader)
  EACH_CHOICE(compute_prompt)
  EACH_CHOICE(branch)
  EACH_CHOICE(copy)
  EACH_CHOICE(join_alone)
  EACH_CHOICE(emit)
  EACH_CHOICE(break_down)
  EACH_REQUEST(take_cancel)
  EACH_CHOICE(take_enough)
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
