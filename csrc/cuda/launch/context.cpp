#include "cuda/launch/context.h"

#include <algorithm>
#include <thread>

#include "cuda/launch/local_group.h"
#include "cuda/launch/transfer.h"
#include "cuda/streams/ops.h"

namespace ringcomm::cuda {

namespace {

std::mutex& registry_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::map<std::string, std::weak_ptr<SharedState>>& registry() {
  static auto* const states =
      new std::map<std::string, std::weak_ptr<SharedState>>;  // engines may outlive static objects
  return *states;
}

constexpr std::chrono::seconds kAbortGrace(1);  // for a stream to set the flags of an abort

std::string without_spaces(std::string text) {
  std::replace(text.begin(), text.end(), ' ', '_');
  return text;
}

// Adds the channels that a tuning file asks for, unless the caller has set their number.
EngineOptions with_channels(EngineOptions options, const Tuning& tuning) {
  if (options.channels == 0) options.channels = tuning.most_channels();
  return options;
}

}  // namespace

SharedState::SharedState(std::string identity)
    : identity_(std::move(identity)), matcher_(std::make_unique<Matcher>(abort_state)) {}

SharedState::~SharedState() {
  const std::lock_guard<std::mutex> lock(registry_mutex());
  if (const auto it = registry().find(identity_); it != registry().end() && it->second.expired()) registry().erase(it);
}

std::shared_ptr<SharedState> SharedState::of(const std::string& identity) {
  const std::lock_guard<std::mutex> lock(registry_mutex());
  std::weak_ptr<SharedState>& known = registry()[identity];
  std::shared_ptr<SharedState> state = known.lock();
  if (!state) known = state = std::shared_ptr<SharedState>(new SharedState(identity));
  return state;
}

std::shared_ptr<LocalGroup> SharedState::local_group(const PeerMemory& memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<LocalGroup>& group_of_device = local_groups_[memory.device()];
  if (!group_of_device) group_of_device = std::make_shared<LocalGroup>(abort_state, memory.local_ranks());
  return group_of_device;
}

void SharedState::end_all() {
  matcher_->end_all();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [device, group_of_device] : local_groups_) group_of_device->end_all();
}

Context::Context(int rank, int world_size, const EngineOptions& options)
    : timeout_ms(options.timeout_ms),
      rank_(rank),
      world_size_(world_size),
      device_(options.device),
      tuning_(Tuning::from_environment()),
      threads_(threads_from_environment()),
      apart_(apart_from_environment()),
      usual_channels_(default_layout(world_size, options).channels),
      peer_memory_(std::make_unique<PeerMemory>(rank, world_size, options.device, with_channels(options, tuning_))),
      events_(std::make_shared<StreamEvents>(options.device)),
      unconnected_(SharedState::of(concat("rank ", rank, " at ", this))),
      shared_(unconnected_.get()) {
  const DeviceFacts& facts = peer_memory_->facts();
  peer_memory_->set_settings(concat("device=", without_spaces(facts.name), ",sms=", facts.multiprocessors,
                                    ",sm=", facts.major, facts.minor, ",threads=", threads_,
                                    ",apart=", static_cast<int>(apart_), ",tuning=", tuning_.checksum()));
  if (apart_ == Separation::kPrivate) peer_memory_->hide_user_memory();
}

void Context::connect(const std::vector<std::string>& handles, const std::function<void()>& prepare) {
  peer_memory_->connect(handles, [&] {
    if (tuning_.serves(world_size_))
      tuning_.check_measured_on(peer_memory_->facts().name, peer_memory_->worst_path(), rank_);
    if (!setting().known) copy_stream_ = lend_stream(device_, rank_);
    prepare();
  });
  connected_ = SharedState::of(peer_memory_->identity());
  shared_.store(connected_.get(), std::memory_order_release);
  if (unconnected_->abort_state.ended()) abort(unconnected_->abort_state.why(), unconnected_->abort_state.code());
}

Setting Context::setting() const {
  Setting setting;
  setting.layout = peer_memory_->layout();
  setting.usual_channels = usual_channels_;
  setting.known = apart_ == Separation::kNo && static_cast<int>(peer_memory_->local_ranks().size()) == world_size_;
  setting.whole_lines = peer_memory_->worst_path() >= Path::kNvlink;
  setting.ranks_of_a_device = peer_memory_->most_ranks_of_a_device();
  setting.threads = threads_;
  return setting;
}

// Tested on words that no call uses.
bool Context::has_word_ops() {
  std::call_once(asked_word_ops_, [this] {
    char* const own = peer_memory_->segment(rank_) + peer_memory_->layout().copy_words_at(rank_);
    auto* const word = &reinterpret_cast<CopyWords*>(own)->ready;
    has_word_ops_ = try_word_ops({{word, 1, false}, {word, 1, true}}, peer_memory_->stream()) == cudaSuccess;
    if (!has_word_ops_) cudaGetLastError();
  });
  return has_word_ops_;
}

bool Context::ended() const {
  if (shared().abort_state.ended()) return true;
  if (!peer_memory_) return false;
  const HostPage& page = *peer_memory_->page();
  return load_acquire(&page.status.code) != 0 || load_acquire(&page.stopped.value) != 0;
}

void Context::check(Op op) {
  if (!ended()) return;
  try {
    raise_end(op);
  } catch (const Error& error) {
    abort(error.what(), error.code());
    throw;
  }
}

// A failure that a kernel of this rank recorded comes first: it says more than the abort that followed.
void Context::raise_end(Op op) const {
  const auto failure = static_cast<Failure>(peer_memory_ ? load_acquire(&peer_memory_->page()->status.code) : 0);
  const bool told = failure == Failure::kAborted && shared().abort_state.ended();
  if (failure != Failure::kNone && !told) {
    const Op last = static_cast<Op>(last_op_.load(std::memory_order_relaxed));
    const std::string calls = last == op ? name(op) : concat(name(op), " after ", name(last));
    throw explain(peer_memory_->page()->status, rank_, calls, last_limit_.load(std::memory_order_relaxed));
  }
  shared().abort_state.check(op, rank_);
  fail(ErrorCode::kAborted, name(op), ": rank ", rank_,
       " expected the other ranks to go on, got an abort by a rank that gave up; see the errors of the other ranks",
       kAdvice);
}

void Context::abort(const std::string& reason, ErrorCode code) noexcept {
  if (!shared().abort_state.record(reason, code)) return;
  if (peer_memory_) peer_memory_->stop();
  shared().end_all();
  if (peer_memory_) peer_memory_->await_stop(kAbortGrace);
}

void Context::abort_and_throw(ErrorCode code, const std::string& message) {
  const std::string text = message + kAdvice;
  abort(text, code);
  throw Error(code, text);
}

void Context::await(PendingCall& pending, Op op, Clock::time_point end, std::int64_t limit) {
  while (pending.open()) {
    const auto now = Clock::now();
    if (now >= end) {
      const std::string missing = pending.missing();
      if (pending.cancel())
        abort_and_throw(ErrorCode::kTimeout,
                        concat(name(op), ": rank ", rank_, " expected ", missing, " within ", seconds(limit),
                               "; see whether they have stalled or call something else"));
    } else if (ended()) {
      pending.cancel();
    } else {
      pending.await(std::min(end, now + kHeartbeat));
    }
  }
  rethrow(pending, op);
}

void Context::rethrow(const PendingCall& pending, Op op) {
  if (!pending.failed()) return;
  if (pending.error()) std::rethrow_exception(pending.error());
  for (int i = 0; i < 1000 && !ended(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  check(op);  // if a kernel has given up, this says why
  fail(ErrorCode::kAborted, name(op), ": rank ", rank_,
       " expected an open communicator, got a closed one; create a new one");
}

void Context::release_peer_memory(bool idle) {
  if (!idle) {
    peer_memory_.release();  // NOLINT: kernels may still write there
    return;
  }
  peer_memory_.reset();
  if (copy_stream_) take_back_stream(device_, copy_stream_);
}

}  // namespace ringcomm::cuda
