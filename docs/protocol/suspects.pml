/* A poison request that kills whoever computes it, its neighbours, two decode workers and two prefill workers.
 *
 * Request 0 is the poison: a step with it ends the process, with all that others have there. The budget of its failures
 * must stop it, and no neighbour may use up its own budget on its account. Killed workers are back at once; nothing else
 * goes wrong here, so that every failure is the poison's. Tokens and pages are left out.
 *
 * Follows gateway/streams.py and placing.py, decode_worker/intake.py, receiver.py and scheduler.py. Where this and they
 * differ, README.md says so.
 */

#ifndef NUM_REQUESTS
#define NUM_REQUESTS 2
#endif
#ifndef MAX_FAILURES
#define MAX_FAILURES 3
#endif
#ifndef MAX_TRIES
#define MAX_TRIES 2
#endif
#define SUSPICIOUS 2          /* failures with which a request is computed beside nobody */

/* a request */
#define AWAY 0                /* to be placed */
#define QUEUED 1              /* in a worker's stream, not accepted */
#define TAKEN 2               /* accepted, without pages */
#define REMOTE 3              /* a prefill worker computes its prompt */
#define COMPUTING 4           /* in the decode worker's batch */
#define DONE 5
#define FAILED 6

byte r_state[NUM_REQUESTS], r_worker[NUM_REQUESTS], r_prefill[NUM_REQUESTS];
byte r_failures[NUM_REQUESTS], r_tries[NUM_REQUESTS];
bit r_alone[NUM_REQUESTS];    /* what its job says */
bit is_known_exclusive[2];    /* what the registry knows of the workers: as old as the last heartbeat */
byte num_deaths, i;

#ifdef NO_ALONE
#define IS_SUSPECT(r) false
#else
#ifdef SUSPECT_BY_JOB         /* tries and placements are counted apart */
#define IS_SUSPECT(r) (r_alone[r] || r_tries[r] >= SUSPICIOUS)
#else                         /* all failures count together */
#define IS_SUSPECT(r) (r_alone[r] || r_failures[r] >= SUSPICIOUS)
#endif
#endif
#ifdef COUNT_UNACCEPTED       /* a job that its worker had not accepted is lost with it as a failure */
#define COUNTS_QUEUED 1
#else
#define COUNTS_QUEUED 0
#endif
#ifdef NO_HAND_BACK           /* others wait in the worker where a suspect runs alone */
#define HANDS_BACK false
#else
#define HANDS_BACK true
#endif
#ifdef TRIES_ARE_FREE         /* a prefill worker's death is nobody's failure, and there is no end of tries */
#define COUNTS_TRIES 0
#define MAY_TRY(r) true
#else
#define COUNTS_TRIES 1
#define MAY_TRY(r) (r_tries[r] < MAX_TRIES)
#endif
#ifdef NO_BUDGET
#define IS_SPENT(r) (r_failures[r] >= MAX_FAILURES + 2)
#else
#define IS_SPENT(r) (r_failures[r] >= MAX_FAILURES)
#endif

#define IS_HERE(r, w) (r_state[r] >= TAKEN && r_state[r] <= COMPUTING && r_worker[r] == w)
#define IS_LONER(r, w) (IS_HERE(r, w) && IS_SUSPECT(r))
#if NUM_REQUESTS == 2
#define NEEDS_ALL(w) (IS_LONER(0, w) || IS_LONER(1, w))
#define OTHERS_HERE(r, w) ((r != 0 && IS_HERE(0, w)) || (r != 1 && IS_HERE(1, w)))
#define OTHER_LONER(r, w) ((r != 0 && IS_LONER(0, w)) || (r != 1 && IS_LONER(1, w)))
#define LONER_RUNS(w) ((IS_LONER(0, w) && r_state[0] == COMPUTING) || (IS_LONER(1, w) && r_state[1] == COMPUTING))
#define OTHERS_RUN(r, w) ((r != 0 && IS_HERE(0, w) && r_state[0] != TAKEN) || (r != 1 && IS_HERE(1, w) && r_state[1] != TAKEN))
#else
#define NEEDS_ALL(w) (IS_LONER(0, w) || IS_LONER(1, w) || IS_LONER(2, w))
#define OTHERS_HERE(r, w) ((r != 0 && IS_HERE(0, w)) || (r != 1 && IS_HERE(1, w)) || (r != 2 && IS_HERE(2, w)))
#define OTHER_LONER(r, w) ((r != 0 && IS_LONER(0, w)) || (r != 1 && IS_LONER(1, w)) || (r != 2 && IS_LONER(2, w)))
#define LONER_RUNS(w) ((IS_LONER(0, w) && r_state[0] == COMPUTING) || (IS_LONER(1, w) && r_state[1] == COMPUTING) || \
    (IS_LONER(2, w) && r_state[2] == COMPUTING))
#define OTHERS_RUN(r, w) ((r != 0 && IS_HERE(0, w) && r_state[0] != TAKEN) || (r != 1 && IS_HERE(1, w) && r_state[1] != TAKEN) || \
    (r != 2 && IS_HERE(2, w) && r_state[2] != TAKEN))
#endif

/* ---- parts of steps ------------------------------------------------------------------------------------------------- */

inline leave(r, state) { r_state[r] = state; r_worker[r] = 0; r_prefill[r] = 0; r_tries[r] = 0; r_alone[r] = 0 }

/* B1: no neighbour's budget is used up. */
inline fail(r, next) {
  r_failures[r]++;
  if
  :: IS_SPENT(r) -> assert(r == 0); leave(r, FAILED)
  :: else ->
     if
     :: next == AWAY -> leave(r, AWAY)
     :: else -> r_state[r] = next; r_prefill[r] = 0
     fi
  fi
}

/* ---- gateway and registry ------------------------------------------------------------------------------------------- */

inline place(r, w) {
  d_step { r_state[r] == AWAY && !is_known_exclusive[w] ->
    r_state[r] = QUEUED; r_worker[r] = w; r_alone[r] = (r_failures[r] >= SUSPICIOUS) }
}

inline beat(w) { d_step { is_known_exclusive[w] != NEEDS_ALL(w) -> is_known_exclusive[w] = NEEDS_ALL(w) } }

/* ---- decode worker ----------------------------------------------------------------------------------------------------- */

inline take(r) {
  d_step { r_state[r] == QUEUED ->
    if
    :: HANDS_BACK && NEEDS_ALL(r_worker[r]) -> leave(r, AWAY)
    :: else -> r_state[r] = TAKEN
    fi }
}

/* Two suspects are here: one of them has to go. No failure. */
inline hand_back(r) { d_step { HANDS_BACK && r_state[r] == TAKEN && OTHER_LONER(r, r_worker[r]) -> leave(r, AWAY) } }

/* A suspect waits until everybody else has ended; the others wait while a suspect runs. */
inline compute(r) {
  d_step { r_state[r] == TAKEN && !LONER_RUNS(r_worker[r]) &&
    (!IS_SUSPECT(r) || (HANDS_BACK && !OTHERS_HERE(r, r_worker[r])) || (!HANDS_BACK && !OTHERS_RUN(r, r_worker[r]))) ->
    r_state[r] = COMPUTING }
}

inline send_away(r, p) {
  d_step { r_state[r] == TAKEN && !IS_SUSPECT(r) && MAY_TRY(r) && !LONER_RUNS(r_worker[r]) ->
    r_state[r] = REMOTE; r_prefill[r] = p }
}

inline activate(r) { d_step { r_state[r] == REMOTE -> r_state[r] = COMPUTING; r_prefill[r] = 0 } }

inline finish(r) { d_step { r != 0 && r_state[r] == COMPUTING -> leave(r, DONE) } }

/* ---- the poison works ----------------------------------------------------------------------------------------------------- */

/* B2: it is stopped after as many deaths as its budget has. */
inline count_death() { num_deaths++; assert(num_deaths <= MAX_FAILURES) }

inline share_death_of_decode(r) {
  if
  :: IS_HERE(r, i) -> fail(r, AWAY)
  :: r_state[r] == QUEUED && r_worker[r] == i && COUNTS_QUEUED -> fail(r, AWAY)
  :: r_state[r] == QUEUED && r_worker[r] == i && !COUNTS_QUEUED -> leave(r, AWAY)
  :: else
  fi
}

inline kill_decode() {
  d_step { r_state[0] == COMPUTING ->
    count_death();
    i = r_worker[0];
    share_death_of_decode(0); share_death_of_decode(1);
#if NUM_REQUESTS == 3
    share_death_of_decode(2);
#endif
    is_known_exclusive[i] = 0; i = 0 }
}

inline share_death_of_prefill(r) {
  if
  :: r_state[r] == REMOTE && r_prefill[r] == i ->
     if
     :: COUNTS_TRIES -> r_tries[r]++; fail(r, TAKEN)
     :: else -> r_state[r] = TAKEN; r_prefill[r] = 0
     fi
  :: else
  fi
}

inline kill_prefill() {
  d_step { r_state[0] == REMOTE ->
    count_death();
    i = r_prefill[0];
    share_death_of_prefill(0); share_death_of_prefill(1);
#if NUM_REQUESTS == 3
    share_death_of_prefill(2);
#endif
    i = 0 }
}

#if NUM_REQUESTS == 2
#define EACH(step) :: step(0) :: step(1)
#define EACH_AT(step) :: step(0, 0) :: step(0, 1) :: step(1, 0) :: step(1, 1)
#else
#define EACH(step) :: step(0) :: step(1) :: step(2)
#define EACH_AT(step) :: step(0, 0) :: step(0, 1) :: step(1, 0) :: step(1, 1) :: step(2, 0) :: step(2, 1)
#endif

active proctype world() {
  do
  EACH_AT(place)
  :: beat(0)
  :: beat(1)
  EACH(take)
  EACH(hand_back)
  EACH(compute)
  EACH_AT(send_away)
  EACH(activate)
  EACH(finish)
  :: kill_decode()
  :: kill_prefill()
  :: timeout -> break
  od;
  skip;
  /* Nothing more can happen. L1: everybody has ended; B1: the neighbours well. */
  d_step {
    assert(r_state[0] == FAILED);
    assert(r_state[1] == DONE);
#if NUM_REQUESTS == 3
    assert(r_state[2] == DONE);
#endif
    assert(!is_known_exclusive[0] && !is_known_exclusive[1])
  }
}
