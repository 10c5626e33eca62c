/* One hand-over over a live link that loses, doubles, delays and reorders messages. Nobody dies: every repair is the
 * work of a timer or of an answer.
 *
 * Follows decode_worker/receiver.py, reception.py, servicer.py and releases.py, and prefill_worker/intake.py,
 * announcer.py and holdings.py: the author numbers its tries, a claimer binds before it computes, each of Bind, Announce
 * and Commit is a call with an answer, leases are renewed by binding. Tries are told apart on both sides, so which
 * prefill worker claims one does not matter here.
 *
 * Messages lie in a bag and are delivered in any order. A call times out when its request or its answer was lost, or
 * (LATENESS) while either is still on its way. A page has two halves; a copy is check, half, half, check.
 */

#ifndef MAX_TRIES
#define MAX_TRIES 2
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef DOUBLES
#define DOUBLES 0             /* messages that are delivered twice */
#endif
#ifndef LATENESS
#define LATENESS 0            /* timers that end though nothing was lost */
#endif
#ifndef CANCELS
#define CANCELS 0
#endif

/* a message of a try; the first three are calls */
#define BIND 1
#define ANNOUNCE 2
#define COMMIT 4
#define RELEASE 8
/* the answer on its way back */
#define NO_ANSWER 0
#define GO 1
#define REFUSED 2             /* stale or cancelled */
/* a try on the prefill worker */
#define IDLE 0
#define BINDING 1
#define COMPUTING 2
#define ANNOUNCING 3
#define COMMITTING 4
#define HELD 5
#define ENDED 6
/* the sequence on the decode worker */
#define TRYING 0
#define LOSING 1              /* the try is over; its copies are being stopped */
#define WINNING 2
#define LEAVING 3
#define LOCAL 4
#define DECODING 5
#define OVER 6
/* a task in Redis */
#define NO_TASK 0
#define PUBLISHED 1
#define CLAIMED 2
/* what half a page holds */
#define NOTHING 0
#define RIGHT 1
#define WRONG 2               /* somebody else's */
/* a copy */
#define NO_COPY 0
#define CHECK_BEFORE 1
#define FIRST_HALF 2
#define SECOND_HALF 3
#define CHECK_AFTER 4

#define NUM (MAX_TRIES + 1)   /* tries count from 1 */

byte losses_left = LOSSES, doubles_left = DOUBLES, lateness_left = LATENESS, cancels_left = CANCELS;

bit is_calm;
#define MAY(budget) (budget > 0 && !is_calm)

byte task[NUM];
byte in_flight[NUM], in_flight_again[NUM];   /* sets of messages */
byte answer[NUM];                            /* to the one call that the prefill worker waits for */

byte p_state[NUM], p_page[NUM], p_generation[NUM];

byte d_state = TRYING, d_try = 1;
bit d_bound, d_requested, d_arrived, d_committed;
byte d_half[2];
bit has_wasted, has_answered;

byte c_phase[2], c_try[2], c_generation[2];  /* copies: a second one runs beside the first only if asked to */

#define IS_CALM (losses_left == LOSSES && doubles_left == DOUBLES && lateness_left == LATENESS && cancels_left == CANCELS)
#define IS_HOLDING(t) (p_state[t] >= COMPUTING && p_state[t] <= HELD)
#define IS_CURRENT(t) (d_state == TRYING && d_try == t)
#define NO_COPIES (c_phase[0] == NO_COPY && c_phase[1] == NO_COPY)

#ifdef FORGET_BINDING         /* a binding counts as held only when its answer has come */
#define IS_KNOWN(t) IS_HOLDING(t)
#else
#define IS_KNOWN(t) (IS_HOLDING(t) || p_state[t] == BINDING)
#endif
#ifdef NO_STOP                /* a try ends without waiting for its copies */
#define HAS_STOPPED true
#else
#define HAS_STOPPED NO_COPIES
#endif
#ifdef PULL_TWICE             /* an announcement that comes again is pulled again */
#define IS_REQUESTED false
#else
#define IS_REQUESTED d_requested
#endif
#ifdef NO_UNKNOWN             /* a renewal does not tell what is no longer held */
#define TELLS_UNKNOWN false
#else
#define TELLS_UNKNOWN true
#endif
#ifdef NO_LEASE
#define ENDS_LEASES false
#else
#define ENDS_LEASES true
#endif
#ifdef NO_BIND_TIMER
#define TIMES_BINDING false
#else
#define TIMES_BINDING true
#endif

/* ---- parts of steps ------------------------------------------------------------------------------------------------ */

inline take_message(t, kind) {
  if
  :: in_flight_again[t] & kind -> in_flight_again[t] = in_flight_again[t] & ~kind
  :: else -> in_flight[t] = in_flight[t] & ~kind
  fi
}

inline end_try(next) {
  if
  :: d_bound -> in_flight[d_try] = in_flight[d_try] | RELEASE
  :: else
  fi;
  task[d_try] = NO_TASK;
  d_bound = 0; d_requested = 0; d_arrived = 0; d_committed = 0;
  d_state = next
}

inline lose_try() { has_wasted = 1; end_try(LOSING) }

/* The only way out of a binding: the generation first, then the pages. */
inline end_binding(t) { p_generation[t]++; p_state[t] = ENDED }

/* ---- the link ------------------------------------------------------------------------------------------------------- */

/* From here on nothing goes wrong any more: what should happen "eventually" must not need another fault. */
inline calm_down() { d_step { !is_calm && (losses_left > 0 || doubles_left > 0 || lateness_left > 0 || cancels_left > 0) -> is_calm = 1 } }

inline lose(t, kind) {
  d_step { MAY(losses_left) && (in_flight[t] & kind) -> losses_left--; in_flight[t] = in_flight[t] & ~kind }
}

inline lose_answer(t) {
  d_step { MAY(losses_left) && answer[t] != NO_ANSWER -> losses_left--; answer[t] = NO_ANSWER }
}

inline double(t, kind) {
  d_step { MAY(doubles_left) && (in_flight[t] & kind) -> doubles_left--; in_flight_again[t] = in_flight_again[t] | kind }
}

/* ---- prefill worker ------------------------------------------------------------------------------------------------- */

inline claim(t) {
  d_step { task[t] == PUBLISHED && p_state[t] == IDLE ->
    task[t] = CLAIMED; p_state[t] = BINDING; in_flight[t] = in_flight[t] | BIND }
}

inline compute(t) {
  d_step { p_state[t] == COMPUTING ->
    p_page[t] = RIGHT; p_state[t] = ANNOUNCING; in_flight[t] = in_flight[t] | ANNOUNCE }
}

inline hear_answer(t) {
  d_step { answer[t] != NO_ANSWER ->
    if
    :: answer[t] == GO && p_state[t] == BINDING -> p_state[t] = COMPUTING
    :: answer[t] == GO && p_state[t] == ANNOUNCING -> p_state[t] = COMMITTING; in_flight[t] = in_flight[t] | COMMIT
    :: answer[t] == GO && p_state[t] == COMMITTING -> p_state[t] = HELD
    :: answer[t] == REFUSED -> end_binding(t)
    fi;
    answer[t] = NO_ANSWER }
}

/* Nobody has answered in time: whoever does not know how the call ended gives the binding up. */
inline miss_answer(t) {
  d_step { (p_state[t] == BINDING || p_state[t] == ANNOUNCING || p_state[t] == COMMITTING) && answer[t] == NO_ANSWER &&
    (MAY(lateness_left) || !((in_flight[t] | in_flight_again[t]) & (BIND | ANNOUNCE | COMMIT))) ->
    if
    :: (in_flight[t] | in_flight_again[t]) & (BIND | ANNOUNCE | COMMIT) -> lateness_left--
    :: else
    fi;
    if
#ifdef NO_END_ON_FAILURE
    :: p_state[t] != BINDING -> p_state[t] = HELD
#endif
    :: else -> end_binding(t)
    fi }
}

/* May come before the answer to Bind: then nothing is held when that comes. */
inline take_release(t) {
  d_step { (in_flight[t] | in_flight_again[t]) & RELEASE ->
    take_message(t, RELEASE);
    if
    :: IS_HOLDING(t) || p_state[t] == BINDING -> end_binding(t); answer[t] = NO_ANSWER
    :: else
    fi }
}

/* No renewal comes for a try that is over. (LATENESS: it comes too late.) */
inline end_lease(t) {
  d_step { ENDS_LEASES && IS_HOLDING(t) && (MAY(lateness_left) || !(IS_CURRENT(t) && d_bound)) ->
    if
    :: IS_CURRENT(t) && d_bound -> lateness_left--
    :: else
    fi;
    end_binding(t); answer[t] = NO_ANSWER }
}

inline reuse_page(t) { d_step { p_state[t] == ENDED && p_page[t] == RIGHT -> p_page[t] = WRONG } }

/* ---- decode worker --------------------------------------------------------------------------------------------------- */

inline reply(t, waiting, verdict) {
  if
  :: p_state[t] == waiting && answer[t] == NO_ANSWER -> answer[t] = verdict
  :: else                     /* to a call that is over, or a second answer to one call: nobody hears it */
  fi
}

inline take_bind(t) {
  d_step { (in_flight[t] | in_flight_again[t]) & BIND ->
    take_message(t, BIND);
    if
    :: IS_CURRENT(t) -> d_bound = 1; reply(t, BINDING, GO)
    :: else -> reply(t, BINDING, REFUSED)
    fi }
}

inline take_announce(t) {
  d_step { (in_flight[t] | in_flight_again[t]) & ANNOUNCE ->
    take_message(t, ANNOUNCE);
    if
    :: IS_CURRENT(t) && d_bound ->
       if
       :: !IS_REQUESTED && c_phase[0] == NO_COPY -> c_phase[0] = CHECK_BEFORE; c_try[0] = t; c_generation[0] = p_generation[t]
       :: !IS_REQUESTED && c_phase[0] != NO_COPY && c_phase[1] == NO_COPY ->
          c_phase[1] = CHECK_BEFORE; c_try[1] = t; c_generation[1] = p_generation[t]
       :: else
       fi;
       d_requested = 1;
       reply(t, ANNOUNCING, GO)
    :: else -> reply(t, ANNOUNCING, REFUSED)
    fi }
}

inline take_commit(t) {
  d_step { (in_flight[t] | in_flight_again[t]) & COMMIT ->
    take_message(t, COMMIT);
    if
    :: IS_CURRENT(t) && d_bound -> d_committed = 1; reply(t, COMMITTING, GO)
    :: else -> reply(t, COMMITTING, REFUSED)
    fi }
}

inline hear_unknown() {
  d_step { TELLS_UNKNOWN && d_state == TRYING && d_bound && !IS_KNOWN(d_try) -> lose_try() }
}

/* Three quarters of a lease without an answer. */
inline give_up_binding() {
  d_step { MAY(lateness_left) && d_state == TRYING && d_bound -> lateness_left--; lose_try() }
}

inline miss_binding() {
  d_step { TIMES_BINDING && d_state == TRYING && !d_bound && (MAY(lateness_left) || p_state[d_try] == ENDED) ->
    if
    :: p_state[d_try] != ENDED -> lateness_left--
    :: else
    fi;
    lose_try() }
}

inline win() { d_step { d_state == TRYING && d_committed && d_arrived -> end_try(WINNING) } }

inline go_on() {
  d_step { d_state >= LOSING && d_state <= LEAVING && HAS_STOPPED ->
    if
    :: d_state == WINNING -> d_state = DECODING
    :: d_state == LOSING && d_try < MAX_TRIES -> d_try++; task[d_try] = PUBLISHED; d_state = TRYING
    :: d_state == LOSING && d_try == MAX_TRIES -> d_state = LOCAL
    :: d_state == LEAVING -> let_go()
    fi }
}

inline let_go() { d_state = OVER; d_half[0] = NOTHING; d_half[1] = NOTHING }

inline compute_locally() { d_step { d_state == LOCAL -> d_half[0] = RIGHT; d_half[1] = RIGHT; d_state = DECODING } }

/* S1: tokens are computed from complete pages of the request. */
inline emit() {
  d_step { d_state == DECODING -> assert(d_half[0] == RIGHT && d_half[1] == RIGHT); has_answered = 1; let_go() }
}

inline cancel() {
  d_step { MAY(cancels_left) && d_state != OVER && d_state != LEAVING ->
    cancels_left--;
    if
    :: d_state == TRYING -> end_try(LEAVING)
    :: else -> d_state = LEAVING
    fi }
}

/* ---- copies ----------------------------------------------------------------------------------------------------------- */

#define REFERENCE_HOLDS(k) (p_generation[c_try[k]] == c_generation[k])

inline end_copy(k) { c_phase[k] = NO_COPY; c_try[k] = 0; c_generation[k] = 0 }

inline fail_copy(k) {
  if
  :: IS_CURRENT(c_try[k]) -> lose_try()
  :: else
  fi;
  end_copy(k)
}

inline check_before(k) {
  d_step { c_phase[k] == CHECK_BEFORE ->
    if
    :: REFERENCE_HOLDS(k) -> c_phase[k] = FIRST_HALF
    :: else -> fail_copy(k)
    fi }
}

/* S4: a copy writes only into pages of a reception that has not let go. */
inline copy_half(k, phase, half) {
  d_step { c_phase[k] == phase ->
    assert(d_state <= LEAVING);
    d_half[half] = p_page[c_try[k]]; c_phase[k]++ }
}

inline check_after(k) {
  d_step { c_phase[k] == CHECK_AFTER ->
    if
    :: REFERENCE_HOLDS(k) ->
       if
       :: IS_CURRENT(c_try[k]) -> d_arrived = 1
       :: else
       fi;
       end_copy(k)
    :: else -> fail_copy(k)
    fi }
}

/* Told to stop when its try ended; it does so sooner or later. */
inline stop_copy(k) { d_step { c_phase[k] != NO_COPY && d_state >= LOSING -> end_copy(k) } }

#define EACH_MESSAGE(step, t) :: step(t, BIND) :: step(t, ANNOUNCE) :: step(t, COMMIT) :: step(t, RELEASE)
#define EACH_TRY(step) :: step(1) :: step(2)
#define EACH_COPY(step) :: step(0) :: step(1)

active proctype world() {
  task[1] = PUBLISHED;
  do
  EACH_MESSAGE(lose, 1)
  EACH_MESSAGE(lose, 2)
  EACH_MESSAGE(double, 1)
  EACH_MESSAGE(double, 2)
  EACH_TRY(lose_answer)
  EACH_TRY(claim)
  EACH_TRY(compute)
  EACH_TRY(hear_answer)
  EACH_TRY(miss_answer)
  EACH_TRY(take_release)
  EACH_TRY(end_lease)
  EACH_TRY(reuse_page)
  EACH_TRY(take_bind)
  EACH_TRY(take_announce)
  EACH_TRY(take_commit)
  :: hear_unknown()
  :: give_up_binding()
  :: miss_binding()
  :: win()
  :: go_on()
  :: compute_locally()
  :: emit()
  :: cancel()
  :: calm_down()
  EACH_COPY(check_before)
  :: copy_half(0, FIRST_HALF, 0)
  :: copy_half(0, SECOND_HALF, 1)
  :: copy_half(1, FIRST_HALF, 0)
  :: copy_half(1, SECOND_HALF, 1)
  EACH_COPY(check_after)
  EACH_COPY(stop_copy)
  :: timeout -> break
  od;
  skip;
  /* Nothing more can happen. L1: the request is answered or cancelled. L2: nothing is held or left. L3: calm wastes nothing. */
  d_step {
    assert(d_state == OVER && NO_COPIES);
    assert(has_answered || cancels_left < CANCELS);
    assert(task[1] == NO_TASK && task[2] == NO_TASK);
    assert(!IS_HOLDING(1) && !IS_HOLDING(2) && p_state[1] != BINDING && p_state[2] != BINDING);
    assert(!has_wasted || !IS_CALM)
  }
}
