#include "cuda/launch/transfer.h"

#include <algorithm>

#include "core/call/signature.h"
#include "cuda/launch/context.h"
#include "cuda/launch/grid.h"

namespace ringcomm::cuda {

// One side of a message inside this process.
class Matcher::Message final : public PendingCall {
 public:
  Message(Matcher& owner, Context& context, Call c, cudaStream_t stream, unsigned long long capture)
      : call(std::move(c)),
        context(context),
        rank(context.rank()),
        nbytes(call.count * element_bytes(call.dtype)),
        stream(stream),
        capture(capture),
        ready(context.events().record(stream, capture, context.rank())),
        owner_(owner) {}

  bool sends() const { return call.op == Op::kSend; }
  // Whether `receive` asks for this message.
  bool is_for(const Message& receive) const {
    return call.root == receive.rank && (receive.call.root == rank || receive.call.root == kAnySource) &&
           call.tag == receive.call.tag;
  }

  bool cancel() override { return owner_.cancel(*this); }
  std::string missing() const override {
    const std::string peer = call.root == kAnySource ? "any rank" : concat("rank ", call.root);
    return concat(peer, " to ", sends() ? "receive" : "send", " ", nbytes, " bytes with tag ", call.tag,
                  ", got no such call");
  }

  const Call call;
  Context& context;
  const int rank;
  const std::size_t nbytes;
  const cudaStream_t stream;
  const unsigned long long capture;
  const StreamEventPtr ready;

 private:
  Matcher& owner_;
};

Matcher::MessagePtr Matcher::claim(std::deque<MessagePtr>& queue, const Message& message) {
  const auto it = std::find_if(queue.begin(), queue.end(), [&](const MessagePtr& other) {
    return message.sends() ? message.is_for(*other) : other->is_for(message);
  });
  if (it == queue.end()) return nullptr;
  MessagePtr other = *it;
  queue.erase(it);
  return other;
}

std::shared_ptr<PendingCall> Matcher::post(Context& context, Call call, cudaStream_t stream,
                                           unsigned long long capture) {
  const auto message = std::make_shared<Message>(*this, context, std::move(call), stream, capture);
  const std::lock_guard<std::mutex> lock(mutex_);
  abort_state_.check(message->call.op, context.rank());
  const MessagePtr other = claim(message->sends() ? receives_ : sends_, *message);
  if (!other) {
    (message->sends() ? sends_ : receives_).push_back(message);
    return message;
  }
  try {
    copy(*message, *other);
  } catch (...) {
    message->fail(std::current_exception());
    other->fail(std::current_exception());
  }
  return message;
}

// Called by the side that comes later, on its stream.
void Matcher::copy(Message& message, Message& other) {
  const Message &from = message.sends() ? message : other, &to = message.sends() ? other : message;
  if (from.nbytes != to.nbytes || from.call.dtype != to.call.dtype)
    fail(ErrorCode::kMismatch, "recv: rank ", to.rank, " expected ", message_text(to.nbytes, to.call.dtype),
         " with tag ", to.call.tag, ", rank ", from.rank, " sent ", message_text(from.nbytes, from.call.dtype),
         "; pass tensors of equal size and dtype to send and recv");
  if (from.capture != to.capture)
    fail(ErrorCode::kInvalid, "recv: rank ", to.rank, " expected the send of rank ", from.rank,
         " in the same graph capture, got one outside of it; capture both from one thread, on streams forked from one");
  const int rank = message.rank;
  const bool crosses = from.context.device() != to.context.device();
  const cudaStream_t stream = crosses ? message.context.copy_stream(message.stream) : message.stream;
  if (stream != message.stream) StreamEvents::follow(stream, message.capture, message.ready, rank);
  StreamEvents::follow(stream, message.capture, other.ready, rank);
  if (from.nbytes && !crosses)
    check(cudaMemcpyAsync(to.call.output, from.call.input, from.nbytes, cudaMemcpyDefault, stream),
          "cudaMemcpyAsync of a message", rank);
  else if (from.nbytes)
    check(cudaMemcpyPeerAsync(to.call.output, to.context.device(), from.call.input, from.context.device(), from.nbytes,
                              stream),
          "cudaMemcpyPeerAsync of a message", rank);
  const StreamEventPtr end = message.context.events().record(stream, message.capture, rank);
  if (stream != message.stream) StreamEvents::follow(message.stream, message.capture, end, rank);
  Message& receive = message.sends() ? other : message;
  receive.came_from(from.rank);
  message.enqueued(end, false);
  other.enqueued(end, false);
}

bool Matcher::cancel(const Message& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& queue = message.sends() ? sends_ : receives_;
  const auto it = std::find_if(queue.begin(), queue.end(), [&](const MessagePtr& m) { return m.get() == &message; });
  if (it == queue.end()) return false;
  const MessagePtr kept = *it;
  queue.erase(it);
  kept->fail(nullptr);
  return true;
}

std::vector<std::shared_ptr<PendingCall>> Matcher::close(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto error =
      std::make_exception_ptr(Error(ErrorCode::kAborted, concat("recv: rank ", rank,
                                                                " closed the communicator with this message in flight; "
                                                                "wait for it before")));
  const auto own = [rank](const MessagePtr& m) { return m->rank == rank; };
  const auto first = std::stable_partition(receives_.begin(), receives_.end(), [&](const auto& m) { return !own(m); });
  for (auto it = first; it != receives_.end(); ++it) (*it)->fail(error);
  receives_.erase(first, receives_.end());
  std::vector<std::shared_ptr<PendingCall>> open;
  std::copy_if(sends_.begin(), sends_.end(), std::back_inserter(open), own);
  return open;
}

bool Matcher::has_open(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto own = [rank](const MessagePtr& m) { return m->rank == rank; };
  return std::any_of(sends_.begin(), sends_.end(), own) || std::any_of(receives_.begin(), receives_.end(), own);
}

void Matcher::end_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto* queue : {&sends_, &receives_}) {
    for (const MessagePtr& message : *queue) message->fail(nullptr);
    queue->clear();
  }
}

// ---- between processes ----------------------------------------------------------------------------------------------

Links::~Links() {
  if (process_is_ending()) return;
  for (const auto& [key, stream] : streams_) tolerate(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

bool Links::leads_to(int peer) const {
  if (context_.peer_memory().one_process() || peer == context_.rank()) return false;
  return peer == kAnySource || context_.peer_memory().reach(peer) != "pointer";
}

void Links::connect() {
  const RelaxedCapture relaxed(context_.rank());
  threads_ = context_.setting().block_threads();
  room_ = room_for(transfer_kernel(), threads_, context_.device(), context_.rank()) /
          context_.peer_memory().most_ranks_of_a_device();
  channels_ = link_channels(context_.peer_memory().layout(), room_);
  for (int peer = 0; peer < context_.world_size(); ++peer) {
    if (!leads_to(peer)) continue;
    for (const bool sends : {false, true}) {
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate of a link", context_.rank());
      streams_[{peer, sends}] = stream;
    }
  }
}

std::vector<StreamEventPtr> Links::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StreamEventPtr> ends;
  for (const auto& [key, latest] : latest_) ends.push_back(latest.eager());
  return ends;
}

std::shared_ptr<PendingCall> Links::post(const std::vector<const Call*>& calls, cudaStream_t stream,
                                         unsigned long long capture) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const PeerMemory& memory = context_.peer_memory();
  const int rank = context_.rank();
  TransferArgs args{};
  args.layout = memory.layout();
  args.rank = memory.args();
  std::int64_t limit_ms = 0;
  std::map<LinkKey, int> channels;  // the blocks of a link's first message serve all of them
  for (const Call* call : calls) {
    if (call->root == kAnySource)
      fail(ErrorCode::kUnsupported, "recv: rank ", rank,
           " expected a source, got any, which GPU ranks of several processes do not have; name the source");
    const bool sends = call->op == Op::kSend;
    Transfer& transfer = args.transfers[args.num_transfers++];
    transfer.data = sends ? static_cast<char*>(const_cast<void*>(call->input)) : static_cast<char*>(call->output);
    transfer.nbytes = call->count * element_bytes(call->dtype);
    transfer.count = call->count;
    if (transfer.nbytes) transfer.at = memory.locate_own(transfer.data, transfer.nbytes);
    transfer.channels = static_cast<std::int8_t>(message_channels(transfer.nbytes, channels_));
    transfer.peer = static_cast<std::int16_t>(call->root);
    transfer.tag = call->tag;
    transfer.sends = sends;
    transfer.dtype = call->dtype;
    int& most = channels[key_of(*call)];
    most = std::max<int>(most, transfer.channels);
    limit_ms = std::max(limit_ms, context_.limit(*call));
    latest_[key_of(*call)].follow(stream, capture, rank);
  }
  args.timeout_ns = static_cast<std::uint64_t>(limit_ms) * 1000000;
  int blocks = 0, widest = 0;  // all that wait must be on the device at once
  for (const auto& [key, most] : channels) {
    blocks += most;
    widest = std::max(widest, most);
  }
  if (room_ < blocks)
    fail(ErrorCode::kUnsupported, name(calls[0]->op), ": rank ", rank, " expected room on the GPU for ", blocks,
         " blocks of ", threads_, " threads, got room for ", room_, "; use smaller blocks (RINGCOMM_CUDA_THREADS)");
  launch(transfer_kernel(), name(calls[0]->op), dim3(widest, args.num_transfers), threads_, args, stream, false, rank);
  const StreamEventPtr end = context_.events().record(stream, capture, rank);
  for (const Call* call : calls) latest_[key_of(*call)].put(end);
  context_.calls(calls[0]->op, limit_ms);
  if (capture) context_.captured.store(true);
  auto pending = std::make_shared<PendingCall>();
  if (calls[0]->op == Op::kRecv) pending->came_from(calls[0]->root);
  pending->enqueued(end, true);
  return pending;
}

std::vector<std::vector<const Call*>> split_into_launches(const std::vector<const Call*>& calls) {
  if (!calls.empty() && calls.size() <= kMaxTransfers) return {calls};
  std::vector<std::vector<const Call*>> launches;
  std::map<std::pair<int, Op>, std::size_t> next;
  for (const Call* call : calls) {
    const std::size_t at = next[{call->root, call->op}]++;
    if (at == launches.size()) launches.emplace_back();
    launches[at].push_back(call);
  }
  return launches;
}

}  // namespace ringcomm::cuda
