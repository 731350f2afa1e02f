#include "hierarchy/nccl/transport.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/types.h"

namespace ringcomm::nccl {

namespace {

constexpr std::size_t kSignatureAlign = 16;
constexpr auto kGrace = std::chrono::seconds(10);

cudaStream_t to_stream(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }
std::size_t room_of(const CallSignature& signature) { return round_up(signature.mine.size(), kSignatureAlign); }
std::size_t bytes_of(const std::vector<Message>& messages) {
  std::size_t nbytes = 0;
  for (const Message& message : messages) nbytes += message.nbytes;
  return nbytes;
}

class NcclExchange final : public TransportExchange {
 public:
  NcclExchange(NcclTransport& transport, std::vector<Round> rounds, TransportClock::time_point limit,
               cudaStream_t stream)
      : transport_(transport), rounds_(std::move(rounds)), ends_(rounds_.size()), limit_(limit), stream_(stream) {}
  void start(int round) override { ends_.at(round) = transport_.start(rounds_.at(round), limit_, stream_); }
  void finish(int round) override {
    transport_.finish(ends_.at(round), stream_);
    ends_[round] = nullptr;
  }

 private:
  NcclTransport& transport_;
  const std::vector<Round> rounds_;
  std::vector<StreamEventPtr> ends_;
  const TransportClock::time_point limit_;
  const cudaStream_t stream_;
};

std::shared_ptr<TransportState> shared_of(const NcclOptions& options, std::function<bool()> tick) {
  auto shared = std::make_shared<TransportState>();
  shared->place = {options.device, options.rank, options.world_size};
  shared->events = std::make_shared<StreamEvents>(options.device);
  shared->abort_state = std::make_shared<AbortState>();
  shared->watcher = std::make_shared<Watcher>(shared->place, shared->abort_state, std::move(tick));
  return shared;
}

const NcclOptions& checked(const NcclOptions& options) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    fail(ErrorCode::kInvalid, "NCCL: expected a rank below the world size, got rank ", options.rank, " of ",
         options.world_size);
  if (options.unique_ids.size() != kNcclIds)
    fail(ErrorCode::kInvalid, "NCCL: rank ", options.rank, " expected ", kNcclIds, " ids, got ",
         options.unique_ids.size(), "; pass what nccl_unique_id gave to one rank, called so many times");
  if (options.timeout_ms <= 0)
    fail(ErrorCode::kInvalid, "NCCL: rank ", options.rank, " expected a positive timeout, got ", options.timeout_ms,
         " ms");
  return options;
}

TransportClock::time_point end_of(const NcclOptions& options) {
  return TransportClock::now() + std::chrono::milliseconds(options.timeout_ms);
}

}  // namespace

NcclTransport::NcclTransport(const NcclOptions& options)
    : library_(Library::load(checked(options).path)),
      shared_(shared_of(options, [this] { return tick(); })),
      communicator_(library_, *shared_->abort_state, shared_->place, options.unique_ids[0], end_of(options)),
      transfers_(options.device, options.rank),
      queues_(std::make_shared<Queues>()),
      stagings_(options.device, options.rank),
      longest_ms_(options.timeout_ms) {
  const DeviceScope on = on_device();
  for (std::size_t i = 1; i < kNcclIds; ++i)
    queues_->push_back(std::make_unique<MessageQueue>(library_, shared_, options.unique_ids[i], end_of(options)));
}

NcclTransport::~NcclTransport() {
  if (process_is_ending()) return;
  close();
  try {
    const DeviceScope on = on_device();
    for (const Block& block : blocks_) cudaFree(block.data);
  } catch (const Error&) {
    // the device is lost, and its memory with it
  }
}

// ---- checks

void NcclTransport::check_open() const {
  if (closed_.load()) throw TransportFailure{-1, false, "the transport is closed"};
  if (shared_->abort_state->ended()) throw TransportFailure{-1, false, "the transport was aborted"};
  if (const auto failure = shared_->abort_state->failure()) throw *failure;
}

void NcclTransport::check_stream(const char* call, cudaStream_t stream) const {
  if (cuda::is_capturing(stream, rank()))
    fail(ErrorCode::kUnsupported, call, ": rank ", rank(),
         " expected a stream that is not being captured, got one in the capture of a graph; calls between hosts cannot "
         "be captured, make them before or after");
}

std::int64_t NcclTransport::left_ms(TransportClock::time_point limit) const {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - TransportClock::now()).count();
  if (left <= 0) throw TransportFailure{-1, true, "the limit had passed before the round began"};
  return left;
}

// ---- rounds

StreamEventPtr NcclTransport::start(const Round& round, TransportClock::time_point limit, cudaStream_t stream) {
  check_open();
  const DeviceScope on = on_device();
  const std::int64_t limit_ms = left_ms(limit);
  const std::size_t sends = bytes_of(round.sends);
  const StreamEventPtr ready = shared_->record(stream);
  if (sends == 0 && bytes_of(round.recvs) == 0) return ready;
  shared_->follow(transfers_, ready);
  const StreamEventPtr begun = shared_->record(transfers_);
  communicator_.group(round, transfers_, limit);
  const StreamEventPtr end = shared_->record(transfers_);
  shared_->watcher->watch({begun, end, limit_ms, true, only_peer(round), text_of(round)});
  sent_bytes_ += sends;
  return end;
}

void NcclTransport::finish(const StreamEventPtr& end, cudaStream_t stream) {
  const DeviceScope on = on_device();
  shared_->follow(stream, end);
}

std::unique_ptr<TransportExchange> NcclTransport::open(int, std::vector<Round> rounds, TransportClock::time_point limit,
                                                       std::uintptr_t stream) {
  check_open();
  return std::make_unique<NcclExchange>(*this, std::move(rounds), limit, to_stream(stream));
}

// ---- signatures

// CallSignature are sent at once, before the messages, and do not wait for the work on the caller's stream.
std::vector<std::string> NcclTransport::swap(const std::vector<CallSignature>& signatures,
                                             TransportClock::time_point limit, std::uintptr_t) {
  check_open();
  const DeviceScope on = on_device();
  const std::int64_t limit_ms = left_ms(limit);
  std::size_t half = 0;
  for (const CallSignature& each : signatures) half += room_of(each);
  if (half == 0) return {};
  StagingBuffer* const staging = stagings_.take(2 * half);
  Round round;
  std::size_t at = 0;
  for (const CallSignature& each : signatures) {
    std::memcpy(staging->host() + at, each.mine.data(), each.mine.size());
    round.sends.push_back({each.peer, staging->device() + at, each.mine.size()});
    round.recvs.push_back({each.peer, staging->device() + half + at, each.mine.size()});
    at += room_of(each);
  }
  const StreamEventPtr begun = shared_->record(transfers_);
  check(cudaMemcpyAsync(staging->device(), staging->host(), half, cudaMemcpyHostToDevice, transfers_),
        "cudaMemcpyAsync of a transport's signatures", rank());
  communicator_.group(round, transfers_, limit);
  check(cudaMemcpyAsync(staging->host() + half, staging->device() + half, half, cudaMemcpyDeviceToHost, transfers_),
        "cudaMemcpyAsync of a transport's signatures", rank());
  const StreamEventPtr end = shared_->record(transfers_);
  shared_->watcher->watch({begun, end, limit_ms, true, only_peer(round), "signatures: " + text_of(round),
                           [this, signatures, staging, half] {
                             compare(signatures, staging->host() + half);
                             stagings_.put_back(staging);
                           }});
  return {};
}

void NcclTransport::compare(const std::vector<CallSignature>& signatures, const char* theirs) {
  for (const CallSignature& each : signatures) {
    if (std::memcmp(theirs, each.mine.data(), each.mine.size()) != 0)
      shared_->abort_state->fail({each.peer, false, concat("rank ", each.peer, " made another call"), each.mine,
                                  std::string(theirs, each.mine.size())});
    theirs += room_of(each);
  }
}

// ---- messages

bool NcclTransport::advance(const Queues& queues, bool hurry) {
  bool more = false;
  for (const auto& queue : queues) more = queue->advance(hurry) || more;
  return more;
}

std::shared_ptr<Request> NcclTransport::message(const Call& call, std::int64_t limit_ms) {
  const DeviceScope on = on_device();
  const cudaStream_t stream = to_stream(call.stream);
  if (call.root == kAnySource)
    fail(ErrorCode::kUnsupported, "recv: rank ", rank(),
         " asked for a message of any rank, which NCCL cannot wait for; name the source");
  if (call.tag != 0)
    fail(ErrorCode::kUnsupported, name(call.op), ": rank ", rank(), " expected tag 0, got ", call.tag,
         "; NCCL has no tags: messages between two ranks come in the order in which they were sent");
  check_stream(name(call.op), stream);
  check_open();
  longest_ms_ = std::max(longest_ms_.load(), limit_ms);
  const bool sends = call.op == Op::kSend;
  const std::size_t nbytes = call.count * element_bytes(call.dtype);
  void* const data = sends ? const_cast<void*>(call.input) : call.output;
  const auto hurry = [queues = std::weak_ptr<Queues>(queues_), abort_state = shared_->abort_state] {
    try {
      if (const auto all = queues.lock()) advance(*all, true);
    } catch (const TransportFailure& failure) {
      abort_state->fail(failure);
    } catch (const Error& error) {
      abort_state->fail({-1, false, error.what()});
    }
  };
  auto request = std::make_shared<TransportRequest>(shared_, call.op, call.root, hurry);
  const bool up = sends == (call.root > rank());  // from a lower to a higher rank
  (*queues_)[up ? 0 : 1]->post({call.root, data, nbytes}, sends, limit_ms, stream, request);
  if (sends) sent_bytes_ += nbytes;
  shared_->watcher->wake();
  return request;
}

// ---- calls on streams

std::uintptr_t NcclTransport::fork(std::uintptr_t stream) {
  const DeviceScope on = on_device();
  check_stream("an asynchronous call", to_stream(stream));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!async_) async_ = std::make_unique<Stream>(shared_->place.device, rank());
  shared_->follow(*async_, shared_->record(to_stream(stream)));
  return reinterpret_cast<std::uintptr_t>(static_cast<cudaStream_t>(*async_));
}

std::shared_ptr<Request> NcclTransport::join(const Call& call, std::uintptr_t stream) {
  const DeviceScope on = on_device();
  auto request = std::make_shared<TransportRequest>(shared_, call.op, -1);
  request->enqueued(shared_->record(to_stream(stream)));
  return request;
}

void NcclTransport::enter(std::uintptr_t stream) {
  const DeviceScope on = on_device();
  check_stream("a call between hosts", to_stream(stream));
  const std::lock_guard<std::mutex> lock(mutex_);
  shared_->follow(to_stream(stream), last_);
  entered_ = shared_->record(to_stream(stream));
}

void NcclTransport::leave(std::uintptr_t stream, const Call& call, std::int64_t limit_ms) {
  const DeviceScope on = on_device();
  const std::lock_guard<std::mutex> lock(mutex_);
  last_ = shared_->record(to_stream(stream));
  for (Block& block : blocks_)
    if (block.released && !block.behind) block.behind = last_;
  longest_ms_ = std::max(longest_ms_.load(), limit_ms);
  shared_->watcher->watch({entered_, last_, limit_ms, false, -1, name(call.op)});
}

// ---- memory

void* NcclTransport::allocate(std::size_t nbytes) {
  const DeviceScope on = on_device();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Block& block : blocks_)
    if (block.behind && block.nbytes >= nbytes && block.nbytes / 2 <= nbytes && reached(shared_->place, block.behind)) {
      block.behind = nullptr;
      block.released = false;
      return block.data;
    }
  void* data = nullptr;
  check(cudaMalloc(&data, nbytes), "cudaMalloc of a transport's memory", rank());
  blocks_.push_back({data, nbytes});
  return data;
}

void NcclTransport::release(void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Block& block : blocks_)
    if (block.data == data) block.released = true;
}

// ---- the end

// Runs in the watcher's thread.
bool NcclTransport::tick() {
  const bool more = advance(*queues_, false);
  if (shared_->abort_state->is_over()) return false;
  std::optional<TransportFailure> trouble = communicator_.trouble();
  for (const auto& queue : *queues_)
    if (!trouble) trouble = queue->communicator().trouble();
  if (trouble) throw *trouble;
  return more;
}

void NcclTransport::abort() {
  if (!shared_->abort_state->end()) return;
  communicator_.abort();
  for (const auto& queue : *queues_) queue->communicator().abort();
  shared_->watcher->wake();
}

// Waits until all work that was started has ended; returns false if it does not.
bool NcclTransport::await_idle() {
  const auto limit = TransportClock::now() + std::chrono::milliseconds(2 * longest_ms_.load()) + kGrace;
  const auto idle = [&] {
    bool messages = true;
    for (const auto& queue : *queues_) messages = messages && queue->idle();
    return messages && shared_->watcher->idle();
  };
  while (!idle()) {
    if (shared_->abort_state->is_over() || TransportClock::now() >= limit) return false;
    try {
      advance(*queues_, true);
    } catch (const TransportFailure&) {
      return false;
    }
    usleep(100);
  }
  return true;
}

void NcclTransport::close() {
  if (closed_.exchange(true)) return;
  try {
    const DeviceScope on = on_device();
    bool good = !shared_->watcher->runs_this_thread() && await_idle();
    const auto limit = TransportClock::now() + kGrace;
    good = good && communicator_.close(limit);
    for (const auto& queue : *queues_) good = good && queue->communicator().close(limit);
    if (!good) abort();
  } catch (const Error&) {
    abort();  // the device is lost
  }
  shared_->watcher->stop();
}

std::vector<std::pair<std::string, std::string>> NcclTransport::describe() const {
  return {{"nccl", library_.text()}, {"nccl_library", library_.where}};
}

}  // namespace ringcomm::nccl

namespace ringcomm {

std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options) {
  return std::make_unique<nccl::NcclTransport>(options);
}

}  // namespace ringcomm
