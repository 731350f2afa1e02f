#include "runtime/observe/trace.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "runtime/clock.h"
#include "runtime/observe/site.h"

namespace ringcomm::trace {

namespace {

constexpr std::size_t kMostSpans = 1 << 24;  // per thread

struct Buffer {
  const pid_t thread;
  const char* const role;
  std::mutex mutex;
  std::vector<Span> spans;
};

struct Recorder {
  std::mutex mutex;
  std::vector<std::shared_ptr<Buffer>> buffers;
  std::atomic<std::size_t> capacity{0};
  std::atomic<std::uint64_t> dropped{0};
};

Recorder*& recorder();

// For a forked child: makes a new recorder, because a thread of the parent may have held a lock of the old one.
void begin_anew() {
  session.store(0);
  recorder() = new Recorder;
}

Recorder*& recorder() {
  static Recorder* now = [] {
    pthread_atfork(nullptr, nullptr, &begin_anew);
    return new Recorder;  // never destroyed: threads may outlive static objects
  }();
  return now;
}

struct ThreadState {
  const char* role = "caller";
  CallSpan* call = nullptr;
  Recorder* of = nullptr;
  std::shared_ptr<Buffer> buffer;  // a buffer of the recorder `of`
};
ThreadState& here() {
  thread_local ThreadState here;
  return here;
}

Buffer& buffer_here(Recorder& to) {
  ThreadState& h = here();
  if (h.of != &to) {
    h.buffer.reset(new Buffer{static_cast<pid_t>(syscall(SYS_gettid)), h.role, {}, {}});
    h.of = &to;
    const std::lock_guard<std::mutex> lock(to.mutex);
    to.buffers.push_back(h.buffer);
  }
  return *h.buffer;
}

void record(const Span& span) {
  Recorder& to = *recorder();
  try {
    Buffer& buffer = buffer_here(to);
    const std::lock_guard<std::mutex> lock(buffer.mutex);
    if (session.load(std::memory_order_relaxed) != span.session) return;
    const std::size_t capacity = to.capacity.load(std::memory_order_relaxed);
    if (buffer.spans.empty()) buffer.spans.reserve(capacity);
    if (buffer.spans.size() < capacity)
      buffer.spans.push_back(span);
    else
      to.dropped.fetch_add(1, std::memory_order_relaxed);
  } catch (const std::bad_alloc&) {  // destructors end spans, and must not throw
    to.dropped.fetch_add(1, std::memory_order_relaxed);
  }
}

constexpr std::pair<const char*, const char*> kNameAndCategory[] = {
#define X(e, name, category) {name, category},
    RINGCOMM_FOR_EACH_SPAN_KIND(X)
#undef X
};

}  // namespace

const char* name(SpanKind kind) { return kNameAndCategory[static_cast<std::size_t>(kind)].first; }
const char* category(SpanKind kind) { return kNameAndCategory[static_cast<std::size_t>(kind)].second; }

// ---- spans ---------------------------------------------------------------------------------------------------------

void CallSpan::begin(const Origin& origin, std::int64_t number, const Call& call) {
  Span& s = span_.emplace();
  s.session = session.load(std::memory_order_relaxed);
  s.kind = SpanKind::kCall;
  s.origin = origin;
  s.origin.number = number;
  s.nbytes = static_cast<std::int64_t>(call.count * element_bytes(call.dtype));
  exceptions_ = std::uncaught_exceptions();
  outer_ = std::exchange(here().call, this);
  const char* const site = call.site ? call.site : outer_ ? outer_->span().call.site : site_here();
  s.call = {call.op,    call.dtype, call.reduce_op, call.algorithm, nullptr,
            call.count, call.root,  step_now(),     site,           false};
  s.begin_ns = now_ns();
}

void CallSpan::end() {
  span_->end_ns = now_ns();
  span_->call.failed = std::uncaught_exceptions() > exceptions_;
  here().call = outer_;
  record(*span_);
}

void Probe::begin(const Origin* origin, SpanKind kind, int peer, std::int64_t ticket, std::int64_t nbytes) {
  const std::uint32_t now = session.load(std::memory_order_relaxed);
  if (!origin) {
    CallSpan* const call = here().call;
    if (!call || call->span().session != now) return;
    origin = &call->span().origin;
  }
  Span& s = span_.emplace();
  s.session = now;
  s.kind = kind;
  s.origin = *origin;
  s.peer = peer;
  s.ticket = ticket;
  s.nbytes = nbytes;
  s.begin_ns = now_ns();
}

void Probe::end() {
  span_->end_ns = now_ns();
  record(*span_);
}

void Probe::at_step(int step, int send_chunk, int recv_chunk) {
  if (!span_) return;
  span_->step = step;
  span_->send_chunk = send_chunk;
  span_->recv_chunk = recv_chunk;
}

void Probe::at_round(int round, int rail) {
  if (!span_) return;
  span_->step = round;
  span_->rail = rail;
}

void set_algorithm(Algorithm algorithm) {
  if (CallSpan* const call = here().call) call->span().call.algorithm = name(algorithm);
}

void set_role(const char* role) { here().role = role; }

// ---- sessions ------------------------------------------------------------------------------------------------------

void start(std::size_t capacity) {
  static std::uint32_t sessions = 0;
  if (capacity < 1 || capacity > kMostSpans)
    fail(ErrorCode::kInvalid, "trace: expected room for 1 to ", kMostSpans, " spans of each thread, got ", capacity);
  Recorder& r = *recorder();
  const std::lock_guard<std::mutex> lock(r.mutex);
  if (on())
    fail(ErrorCode::kInvalid, "trace: expected one trace of this process at a time, got another; stop the first");
  r.capacity.store(capacity, std::memory_order_relaxed);
  r.dropped.store(0, std::memory_order_relaxed);
  session.store(++sessions, std::memory_order_relaxed);
}

Timeline stop() {
  Recorder& r = *recorder();
  const std::lock_guard<std::mutex> lock(r.mutex);
  if (!on()) fail(ErrorCode::kInvalid, "trace: expected a trace that was started, got none; start one first");
  session.store(0, std::memory_order_relaxed);
  Timeline timeline;
  std::vector<std::shared_ptr<Buffer>> alive;
  for (const auto& buffer : r.buffers) {
    const std::lock_guard<std::mutex> its_lock(buffer->mutex);
    if (!buffer->spans.empty()) timeline.threads.push_back({buffer->thread, buffer->role, std::move(buffer->spans)});
    buffer->spans.clear();
    if (buffer.use_count() > 1) alive.push_back(buffer);  // its thread still runs
  }
  r.buffers = std::move(alive);
  timeline.dropped = r.dropped.load(std::memory_order_relaxed);
  return timeline;
}

}  // namespace ringcomm::trace
