#include "cuda/launch/stream_waits.h"

#include <algorithm>

#include "cuda/launch/context.h"
#include "cuda/streams/ops.h"

namespace ringcomm::cuda {

namespace {

constexpr auto kPause = std::chrono::milliseconds(5);
constexpr auto kPatience = std::chrono::milliseconds(20);  // before the device is asked whether a peer has given up
constexpr auto kLongestLook = std::chrono::seconds(1);     // at the words, to name the ranks that are missing
// Added to a ticket, it is ahead of the words of this call and of its successors.
constexpr std::uint32_t kReleased = 1u << 30;

// Whether all that was enqueued is done. Not, perhaps, where the stream shares its hardware queue with one that waits.
bool is_through(cudaStream_t stream, int rank) {
  const cudaError_t status = cudaStreamQuery(stream);
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaStreamQuery", rank);
  return true;
}

}  // namespace

void StreamWaits::add(Wait wait) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.push_back(std::move(wait));
    if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

void StreamWaits::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StreamWaits::copy_abort_flag(cudaStream_t stream) const {
  const PeerMemory& memory = context_.peer_memory();
  check(cudaMemcpyAsync(&memory.page()->stopped.value, memory.segment(memory.rank()), sizeof(Flag), cudaMemcpyDefault,
                        stream),
        "cudaMemcpyAsync of the abort flag", memory.rank());
}

void StreamWaits::run() {
  try {
    const DeviceScope on(context_.device(), context_.rank());
    loop();
  } catch (const Error& error) {
    context_.abort(error.what(), error.code());  // nobody looks after the waits any more
  }
}

void StreamWaits::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ && !process_is_ending()) {
    if (waits_.empty()) {
      changed_.wait(lock, [this] { return stopping_ || !waits_.empty(); });
      continue;
    }
    std::deque<Wait> waits;
    waits.swap(waits_);
    lock.unlock();
    waits.erase(std::remove_if(waits.begin(), waits.end(), [this](Wait& wait) { return attend(wait); }), waits.end());
    lock.lock();
    waits_.insert(waits_.begin(), std::make_move_iterator(waits.begin()), std::make_move_iterator(waits.end()));
    changed_.wait_for(lock, kPause, [this] { return stopping_; });
  }
}

bool StreamWaits::attend(Wait& wait) {
  const int rank = context_.rank();
  if (reached(*wait.end, rank)) return true;
  if (context_.ended()) {
    release(wait);
    return false;
  }
  const auto now = Clock::now();
  if (!wait.since) {
    if (reached(*wait.begin, rank)) wait.since = now;
  } else if (now > *wait.since + std::chrono::milliseconds(wait.limit_ms)) {
    report_timeout(wait);
  } else if (now > *wait.since + kPatience && is_through(context_.peer_memory().stream(), rank)) {
    copy_abort_flag(context_.peer_memory().stream());
  }
  return false;
}

// All on one stream, in this order. The peers may write the words once more, so this is repeated until the streams are
// through.
void StreamWaits::release(const Wait& wait) {
  PeerMemory& memory = context_.peer_memory();
  if (released_ && !is_through(memory.stream(), memory.rank())) return;  // the last time is still under way
  released_ = true;
  memory.stop();
  std::vector<WordOp> ops;
  for (int p = 0; p < memory.world_size(); ++p) {
    auto* const words = reinterpret_cast<CopyWords*>(memory.segment(memory.rank()) + memory.layout().copy_words_at(p));
    ops.push_back({&words->ready, wait.ticket + kReleased, false});
    ops.push_back({&words->done, wait.ticket + kReleased, false});
  }
  enqueue_word_ops(ops, memory.stream(), memory.rank());
}

void StreamWaits::report_timeout(const Wait& wait) {
  PeerMemory& memory = context_.peer_memory();
  CopyWords* const words = memory.page()->words_seen;
  for (int p = 0; p < memory.world_size(); ++p)
    check(cudaMemcpyAsync(&words[p], memory.segment(memory.rank()) + memory.layout().copy_words_at(p), sizeof(Flag),
                          cudaMemcpyDefault, memory.stream()),
          "cudaMemcpyAsync of a peer's words", memory.rank());
  const auto last = Clock::now() + kLongestLook;
  bool seen = is_through(memory.stream(), memory.rank());
  for (; !seen && Clock::now() < last; seen = is_through(memory.stream(), memory.rank()))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto late = [&](int p, std::uint32_t CopyWords::* word) {
    return seen && p != memory.rank() && static_cast<std::int32_t>(words[p].*word - wait.ticket) < 0;
  };
  std::string missing = "its peers to finish";
  for (int p = memory.world_size(); p-- > 0;)
    if (late(p, &CopyWords::done)) missing = concat("rank ", p, " to finish its part");
  for (int p = memory.world_size(); p-- > 0;)
    if (late(p, &CopyWords::ready)) missing = concat("the stream of rank ", p, " to come to this call");
  context_.abort(concat(name(wait.op), ": rank ", memory.rank(), " expected ", missing, " within ",
                        seconds(wait.limit_ms), ", got no answer; see whether it has stalled", kAdvice),
                 ErrorCode::kTimeout);
}

}  // namespace ringcomm::cuda
