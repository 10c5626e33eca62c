/* One request and two decode workers: its stream moves when a worker dies, freezes, is slow or leaves.
 *
 * A worker that was frozen wakes up as a zombie: it still decodes the old placement. Its answer is longer than anything
 * here (it never ends by itself), so it must be told. Every token is sampled as 0 or 1 anew by whoever computes it, so a
 * stream of two authors shows as a token that continues other tokens than the client has.
 *
 * Follows gateway/dispatch.py, streams.py and feeds.py, and decode_worker/intake.py, ledger.py and worker.py. Prefill is
 * left out: see handover.pml and link.pml.
 */

#ifndef LENGTH
#define LENGTH 2              /* tokens of the answer */
#endif
#ifndef MAX_FAILURES
#define MAX_FAILURES 3        /* the third one ends the request */
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef FAULT_KINDS           /* 1 kill, 2 freeze, 4 gateway dies */
#define FAULT_KINDS 3
#endif
#ifndef SLOWNESS
#define SLOWNESS 0            /* a worker that is only slow, or a feed that breaks */
#endif
#ifndef LOSSES
#define LOSSES 0              /* cancels lost on a live link */
#endif
#ifndef DRAINS
#define DRAINS 0              /* SIGTERM */
#endif
#ifndef CANCELS
#define CANCELS 0
#endif

#define NOBODY 9
/* the request at the gateway */
#define TO_PLACE 0
#define PLACED 1
#define DONE 2
#define FAILED 3
#define CANCELLED 4
/* a worker */
#define DOWN 0
#define UP 1
#define FROZEN 2
#define DRAINING 3
/* what a feed carries */
#define ACCEPTED 1
#define TOKEN 2
#define HANDED_BACK 3

byte faults_left = FAULTS, slowness_left = SLOWNESS, losses_left = LOSSES, drains_left = DRAINS, cancels_left = CANCELS;

bit is_calm;
#define MAY(budget) (budget > 0 && !is_calm)

/* gateway: g_chain holds the shown tokens as bits; g_target was given the job, g_source has accepted it */
bit g_up = 1;
byte g_state, g_placement, g_failures, g_shown, g_chain, g_target = NOBODY, g_source = NOBODY;
bit g_connected[2] = 1;

/* Redis: at most one job, since a higher placement removes the older ones */
byte job_worker = NOBODY, job_placement, job_shown, job_chain;

byte d_up[2] = UP, d_placement[2], d_index[2], d_chain[2], d_tombstone[2];
bit d_running[2];
byte d_extra[2];              /* frames of an answer without end */
byte cancel_to[2];            /* a cancel under way, of this placement and older ones */
chan feed_0 = [2] of { byte, byte, byte, byte, byte };   /* kind, placement, index, the tokens before it, token */
chan feed_1 = [2] of { byte, byte, byte, byte, byte };

byte a, b, c, d, e;           /* scratch of one step */

#define HAS_STREAM(w) ((w == 0 && len(feed_0) > 0) || (w == 1 && len(feed_1) > 0))
#define IS_OPEN(w) (d_up[w] == UP && g_connected[w])
#define IS_AWAITED_FROM(w) (g_source == w || (g_source == NOBODY && g_target == w))
#define ENDS_HERE(w) (g_up && g_state == PLACED && d_placement[w] == g_placement && g_source == w)
#define MAX_EXTRA (FAULTS + SLOWNESS + LOSSES + 2)

#ifdef ANY_PLACEMENT          /* tokens are taken by their index alone */
#define IS_CURRENT(w, placement) (g_state == PLACED)
#else
#define IS_CURRENT(w, placement) (g_state == PLACED && placement == g_placement && w == g_source)
#endif
#ifdef REFUSE_ACCEPTED_ONLY   /* outdated tokens are dropped in silence */
#define IS_REFUSED(kind) (kind == ACCEPTED)
#else
#define IS_REFUSED(kind) (kind == ACCEPTED || kind == TOKEN)
#endif
#ifdef DRAIN_COUNTS
#define COUNTS_HAND_BACK true
#else
#define COUNTS_HAND_BACK false
#endif
#ifdef LEAVE_EARLY            /* leaves though a job stands in its stream */
#define IS_STREAM_READ(w) true
#else
#define IS_STREAM_READ(w) (job_worker != w)
#endif
#ifdef LEAVE_SILENTLY         /* leaves without handing back what it cannot finish */
#define MAY_LEAVE(w) true
#else
#define MAY_LEAVE(w) (!d_running[w])
#endif
#ifdef NO_GRACE               /* a gateway that is gone keeps its requests */
#define FREES_FOR_LOST_GATEWAY false
#else
#define FREES_FOR_LOST_GATEWAY true
#endif
#ifdef NO_BUDGET
#define IS_SPENT false
#else
#define IS_SPENT (g_failures >= MAX_FAILURES)
#endif

/* ---- parts of steps ------------------------------------------------------------------------------------------------- */

inline forget_job() { job_worker = NOBODY; job_placement = 0; job_shown = 0; job_chain = 0 }

inline end_sequence(w) {
  if
  :: d_placement[w] > d_tombstone[w] -> d_tombstone[w] = d_placement[w]
  :: else
  fi;
  d_running[w] = 0; d_placement[w] = 0; d_index[w] = 0; d_chain[w] = 0; d_extra[w] = 0
}

inline send_cancel(w, placement) {
  if
  :: d_up[w] != DOWN && placement > cancel_to[w] -> cancel_to[w] = placement
  :: else
  fi
}

inline end_request(state) { g_state = state; g_shown = 0; g_chain = 0; g_target = NOBODY; g_source = NOBODY }

inline cancel_placement() {
  if
  :: g_source != NOBODY -> send_cancel(g_source, g_placement)
  :: g_source == NOBODY && g_target != NOBODY -> send_cancel(g_target, g_placement)
  :: else
  fi
}

/* The current placement is given up; `counts` says whether that is a failure. */
inline place_again(counts) {
  cancel_placement();
  if
  :: counts -> g_failures++
  :: else
  fi;
  if
  :: IS_SPENT -> end_request(FAILED)
  :: else -> g_state = TO_PLACE; g_target = NOBODY; g_source = NOBODY
  fi
}

inline clear_feed(w, feed) {
  do
  :: len(feed) > 0 -> feed?a,b,c,d,e
  :: else -> break
  od;
  a = 0; b = 0; c = 0; d = 0; e = 0
}

/* ---- gateway ---------------------------------------------------------------------------------------------------------- */

inline place(w) {
  d_step { g_up && g_state == TO_PLACE && IS_OPEN(w) ->
    g_state = PLACED; g_placement++; g_target = w;
    job_worker = w; job_placement = g_placement; job_shown = g_shown; job_chain = g_chain }
}

inline lose_worker(w) {
  if
  :: g_state == PLACED && IS_AWAITED_FROM(w) -> place_again(true)
  :: else
  fi
}

/* The feed breaks: what was under way on it may still come (the worker keeps it for a reconnect) or not. */
inline break_feed(w, feed, keeps) {
  d_step { g_up && g_connected[w] && (d_up[w] == FROZEN || (d_up[w] == DOWN && !keeps) || MAY(slowness_left)) ->
    if
    :: d_up[w] == UP || d_up[w] == DRAINING -> slowness_left--
    :: else
    fi;
    g_connected[w] = 0;
    if
    :: !keeps -> clear_feed(w, feed)
    :: else
    fi;
    lose_worker(w) }
}

inline reconnect(w) { d_step { g_up && !g_connected[w] && (d_up[w] == UP || d_up[w] == DRAINING) -> g_connected[w] = 1 } }

/* S2: what the client gets continues what it has. */
inline take_frame(w, feed) {
  d_step { g_up && g_connected[w] && len(feed) > 0 ->
    feed?a,b,c,d,e;                                    /* kind, placement, index, the tokens before it, token */
    if
    :: a == ACCEPTED && g_state == PLACED && b == g_placement && g_target == w -> g_source = w
    :: a == TOKEN && IS_CURRENT(w, b) && c == g_shown ->
       assert(d == g_chain);
       g_chain = g_chain | (e << g_shown); g_shown++;
       if
       :: g_shown == LENGTH -> end_request(DONE)
       :: else
       fi
    :: a == TOKEN && IS_CURRENT(w, b) && c != g_shown -> place_again(true)       /* frames are missing */
    :: a == HANDED_BACK && g_state == PLACED && b == g_placement && g_source == w -> place_again(COUNTS_HAND_BACK)
    :: else ->
       if
       :: IS_REFUSED(a) -> send_cancel(w, b)
       :: else
       fi
    fi;
    a = 0; b = 0; c = 0; d = 0; e = 0 }
}

inline client_leaves() {
  d_step { g_up && MAY(cancels_left) && g_state < DONE -> cancels_left--; cancel_placement(); end_request(CANCELLED) }
}

inline kill_gateway() {
  d_step { (FAULT_KINDS & 4) && MAY(faults_left) && g_up ->
    faults_left--; g_up = 0; g_connected[0] = 0; g_connected[1] = 0;
    if
    :: g_state < DONE -> end_request(CANCELLED)
    :: else
    fi }
}

/* ---- the link --------------------------------------------------------------------------------------------------------- */

inline lose_cancel(w) {
  d_step { cancel_to[w] > 0 && (MAY(losses_left) || d_up[w] == FROZEN) ->   /* a call to a frozen worker times out */
    if
    :: d_up[w] != FROZEN -> losses_left--
    :: else
    fi;
    cancel_to[w] = 0 }
}

/* ---- decode worker w ---------------------------------------------------------------------------------------------------- */

/* Superseding what is here of an older placement; a cancel may have come first. */
inline take_job(w, feed) {
  d_step { (d_up[w] == UP || d_up[w] == DRAINING) && job_worker == w && len(feed) < 2 ->
    if
    :: job_placement > d_tombstone[w] && (!d_running[w] || d_placement[w] < job_placement) ->
       if
       :: d_running[w] -> end_sequence(w)
       :: else
       fi;
       d_running[w] = 1; d_placement[w] = job_placement; d_index[w] = job_shown; d_chain[w] = job_chain;
       feed!ACCEPTED,job_placement,0,0,0
    :: else
    fi;
    forget_job() }
}

inline emit(w, feed, token) {
  d_step { (d_up[w] == UP || d_up[w] == DRAINING) && d_running[w] && len(feed) < 2 &&
    (d_index[w] < LENGTH - 1 || ENDS_HERE(w)) ->
    feed!TOKEN,d_placement[w],d_index[w],d_chain[w],token;
    d_chain[w] = d_chain[w] | (token << d_index[w]); d_index[w]++;
    if
    :: d_index[w] == LENGTH -> end_sequence(w)
    :: else
    fi }
}

/* The answer of a placement that is not the current one goes on. */
inline emit_more(w, feed) {
  d_step { (d_up[w] == UP || d_up[w] == DRAINING) && d_running[w] && len(feed) == 0 && g_connected[w] && cancel_to[w] == 0 &&
    d_index[w] == LENGTH - 1 && !ENDS_HERE(w) && g_source != w && job_worker != w && d_extra[w] < MAX_EXTRA ->
    d_extra[w]++;
    feed!TOKEN,d_placement[w],LENGTH - 1,d_chain[w],0 }
}

inline take_cancel(w) {
  d_step { (d_up[w] == UP || d_up[w] == DRAINING) && cancel_to[w] > 0 ->
    if
    :: cancel_to[w] > d_tombstone[w] -> d_tombstone[w] = cancel_to[w]
    :: else
    fi;
    if
    :: d_running[w] && d_placement[w] <= cancel_to[w] -> end_sequence(w)
    :: else
    fi;
    cancel_to[w] = 0 }
}

/* After its grace; what it has not read goes, too. */
inline free_for_lost_gateway(w, feed) {
  d_step { FREES_FOR_LOST_GATEWAY && !g_up && (d_running[w] || len(feed) > 0) && (d_up[w] == UP || d_up[w] == DRAINING) ->
    clear_feed(w, feed); end_sequence(w) }
}

/* Draining: closed for new jobs at once, in the registry. */
inline begin_drain(w) { d_step { MAY(drains_left) && d_up[w] == UP -> drains_left--; d_up[w] = DRAINING } }

inline hand_back(w, feed) {
  d_step { d_up[w] == DRAINING && d_running[w] && IS_STREAM_READ(w) && len(feed) < 2 ->
    feed!HANDED_BACK,d_placement[w],0,0,0; end_sequence(w) }
}

inline leave(w, feed) {
  d_step { d_up[w] == DRAINING && MAY_LEAVE(w) && IS_STREAM_READ(w) && (len(feed) == 0 || !g_up) -> stop_worker(w) }
}

inline stop_worker(w) {
  d_up[w] = DOWN; cancel_to[w] = 0; end_sequence(w); d_tombstone[w] = 0;
  if
  :: job_worker == w -> forget_job()                   /* the stream of an incarnation vanishes with it */
  :: else
  fi
}

/* ---- faults --------------------------------------------------------------------------------------------------------------- */

/* From here on nothing goes wrong any more: what should happen "eventually" must not need another fault. */
inline calm_down() { d_step { !is_calm && (faults_left > 0 || slowness_left > 0 || losses_left > 0 || drains_left > 0 || cancels_left > 0) -> is_calm = 1 } }

inline kill_worker(w) {
  d_step { (FAULT_KINDS & 1) && MAY(faults_left) && d_up[w] != DOWN -> faults_left--; stop_worker(w) }
}

/* A new incarnation has a feed of its own; the old one has broken by then. */
inline restart_worker(w) { d_step { d_up[w] == DOWN && !g_connected[w] -> d_up[w] = UP } }

inline freeze_worker(w) {
  d_step { (FAULT_KINDS & 2) && MAY(faults_left) && d_up[w] == UP -> faults_left--; d_up[w] = FROZEN }
}

/* Not before the gateway has noticed: a shorter pause is only slowness. */
inline resume_worker(w) { d_step { d_up[w] == FROZEN && !g_connected[w] -> d_up[w] = UP } }

#define EACH_WORKER(step) :: step(0) :: step(1)
#define EACH_FEED(step) :: step(0, feed_0) :: step(1, feed_1)

active proctype world() {
  do
  EACH_WORKER(place)
  :: break_feed(0, feed_0, true)
  :: break_feed(0, feed_0, false)
  :: break_feed(1, feed_1, true)
  :: break_feed(1, feed_1, false)
  EACH_WORKER(reconnect)
  EACH_FEED(take_frame)
  :: client_leaves()
  :: calm_down()
  :: kill_gateway()
  EACH_WORKER(lose_cancel)
  EACH_FEED(take_job)
  :: emit(0, feed_0, 0)
  :: emit(0, feed_0, 1)
  :: emit(1, feed_1, 0)
  :: emit(1, feed_1, 1)
  EACH_FEED(emit_more)
  EACH_WORKER(take_cancel)
  EACH_FEED(free_for_lost_gateway)
  EACH_WORKER(begin_drain)
  EACH_FEED(hand_back)
  EACH_FEED(leave)
  EACH_WORKER(kill_worker)
  EACH_WORKER(restart_worker)
  EACH_WORKER(freeze_worker)
  EACH_WORKER(resume_worker)
  :: timeout -> break
  od;
  skip;
  /* Nothing more can happen. L1: the request has ended. L2: no worker computes for it. F1: it failed only after as many
   * faults as its budget has, so a drain costs nothing; and not more placements were lost than the budget allows. */
  d_step {
    assert(g_state >= DONE || !g_up);
    assert(!d_running[0] && !d_running[1]);
    assert(job_worker == NOBODY);
    assert(g_state != FAILED || (FAULTS - faults_left) + (SLOWNESS - slowness_left) >= MAX_FAILURES);
    assert(g_failures <= MAX_FAILURES)
  }
}
