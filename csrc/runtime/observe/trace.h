// The timeline: the work of threads over time, as spans, while a tracing session is on. When it is off, a probe costs
// one load of a flag. Events inside a call are recorded only where the call itself is recorded, so that spans nest.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/engine.h"

namespace ringcomm::trace {

inline std::atomic<std::uint32_t> session{0};  // 0: off
inline bool on() { return session.load(std::memory_order_relaxed) != 0; }

// X(enumerator, name, category). The only list of kinds of spans. The categories are "call", "step", "wait" and "work".
#define RINGCOMM_FOR_EACH_SPAN_KIND(X)          \
  X(kCall, "call", "call")                      \
  /* through the boards (core/link.h) */        \
  X(kStep, "step", "step")                      \
  X(kWaitCredit, "wait credit", "wait")         \
  X(kWrite, "write slot", "work")               \
  X(kPublish, "publish", "work")                \
  X(kWaitTicket, "wait ticket", "wait")         \
  X(kRead, "read slot", "work")                 \
  X(kReduce, "reduce", "work")                  \
  X(kCopy, "copy", "work")                      \
  X(kRelease, "release", "work")                \
  /* in place (cpu/collectives/direct.h) */     \
  X(kPublishBuffers, "publish buffers", "step") \
  X(kInPlace, "in place", "step")               \
  X(kLeave, "leave", "step")                    \
  /* point-to-point messages of the user */     \
  X(kSendSlice, "send slice", "work")           \
  X(kReceiveSlice, "receive slice", "work")     \
  /* between hosts */                           \
  X(kAgree, "agree", "wait")                    \
  X(kCompute, "compute", "work")                \
  X(kStartMessages, "start messages", "work")   \
  X(kWaitMessages, "wait messages", "wait")

enum class SpanKind : std::uint8_t {
#define X(e, name, category) e,
  RINGCOMM_FOR_EACH_SPAN_KIND(X)
#undef X
};
const char* name(SpanKind kind);
const char* category(SpanKind kind);

// The call that a span belongs to.
struct Origin {
  std::uint64_t group = 0;  // see group_number in runtime/observe/flight_recorder.h
  int rank = 0, world_size = 1;
  std::int64_t number = -1;  // of the collective; -1: a message, or the engine does not count
};

struct CallFacts {
  Op op;
  DType dtype;
  ReduceOp reduce_op;
  Algorithm asked;
  const char* algorithm;  // the algorithm used; null: there was no choice
  std::size_t count;
  int root;
  std::int64_t training_step;
  const char* site;  // empty if unknown
  bool failed;
};

struct Span {
  SpanKind kind;
  std::uint32_t session;
  std::int64_t begin_ns, end_ns;  // see runtime/clock.h
  Origin origin;
  // -1: does not apply.
  int peer = -1;
  std::int64_t ticket = -1, nbytes = -1;
  int step = -1, send_chunk = -1, recv_chunk = -1;
  int rail = -1;
  CallFacts call;  // only of a kCall span
};

// The span of a call, from its begin to its end in the thread that executes it.
class CallSpan {
 public:
  CallSpan(const Origin& origin, std::int64_t number, const Call& call) {
    if (on()) begin(origin, number, call);
  }
  ~CallSpan() {
    if (span_) end();
  }
  CallSpan(const CallSpan&) = delete;
  CallSpan& operator=(const CallSpan&) = delete;

  Span& span() { return *span_; }

 private:
  void begin(const Origin& origin, std::int64_t number, const Call& call);
  void end();

  std::optional<Span> span_;
  CallSpan* outer_;
  int exceptions_;
};

// A span within the call that the thread executes; it lasts as long as the object lives.
class Probe {
 public:
  explicit Probe(SpanKind kind, int peer = -1, std::int64_t ticket = -1, std::int64_t nbytes = -1) {
    if (on()) begin(nullptr, kind, peer, ticket, nbytes);
  }
  // A span of a point-to-point message, which any thread may move.
  Probe(const Origin& origin, SpanKind kind, int peer, std::int64_t ticket, std::size_t nbytes) {
    if (on()) begin(&origin, kind, peer, ticket, static_cast<std::int64_t>(nbytes));
  }
  ~Probe() {
    if (span_) end();
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  void at_step(int step, int send_chunk, int recv_chunk);
  void at_round(int round, int rail);

 private:
  void begin(const Origin* origin, SpanKind kind, int peer, std::int64_t ticket, std::int64_t nbytes);
  void end();

  std::optional<Span> span_;
};

// Sets the algorithm that the current call of this thread has chosen.
void set_algorithm(Algorithm algorithm);
inline void chose(Algorithm algorithm) {
  if (on()) set_algorithm(algorithm);
}
// Sets the role of this thread; a literal. "caller" where it is not set.
void set_role(const char* role);

struct ThreadSpans {
  pid_t thread;
  const char* role;
  std::vector<Span> spans;
};
struct Timeline {
  std::vector<ThreadSpans> threads;
  std::uint64_t dropped = 0;  // spans that did not fit
};

// Starts a session; each thread keeps its first `capacity` spans. Throws kInvalid if a session is on.
void start(std::size_t capacity);
// Ends the session and returns all spans that have ended. Throws kInvalid without a session.
Timeline stop();

}  // namespace ringcomm::trace
