#include "cpu/collectives/p2p.h"

#include <algorithm>

#include "core/call/check.h"
#include "core/call/signature.h"
#include "core/error.h"
#include "core/schedule.h"
#include "cpu/collectives/tuning.h"
#include "cpu/kernels/loops.h"
#include "runtime/observe/site.h"

namespace ringcomm::cpu {

class PointToPoint::Message : public RequestBase {
 public:
  Message(PointToPoint& owner, Call c)
      : call(std::move(c)),
        nbytes(call.count * element_bytes(call.dtype)),
        deadline(owner.group_.deadline(call)),
        owner_(owner) {
    deadline.passed();  // starts the time limit
  }

  void wait(std::int64_t timeout_ms) override {
    if (!done()) {
      refuse_in_child(call.op);
      owner_.wait(*this, timeout_ms);
    }
    rethrow();
  }
  void complete(std::exception_ptr error) { finish(error); }
  void came_from(int rank) { source_ = rank; }
  // Whether a message of this length and type may be stored there.
  bool takes(std::size_t length, DType dtype) const { return length == nbytes && dtype == call.dtype; }
  bool fits(int source, int tag) const { return (call.root == source || call.root == kAnySource) && call.tag == tag; }

  const Call call;
  const std::size_t nbytes;
  const Deadline deadline;
  std::size_t moved = 0;
  MessageInfo found;         // of a probe
  std::exception_ptr wrong;  // reported after the lock is released, since a callback may make calls

 private:
  PointToPoint& owner_;
};

namespace {

bool has_closed(const Group& group, int rank) { return load_acquire(&group.control(rank).left.value) != 0; }

std::exception_ptr wrong_message(const Call& call, int rank, int source, std::size_t got, DType dtype) {
  return std::make_exception_ptr(
      Error(ErrorCode::kMismatch,
            concat("recv: rank ", rank, " expected ", message_text(call.count * element_bytes(call.dtype), call.dtype),
                   " with tag ", call.tag, ", rank ", source, " sent ", message_text(got, dtype),
                   "; pass tensors of equal size and dtype to send and recv")));
}

}  // namespace

PointToPoint::PointToPoint(Group& group)
    : group_(group), outgoing_(group.world_size()), incoming_(group.world_size()) {}

PointToPoint::MessagePtr PointToPoint::enqueue(Call call) {
  group_.check_abort(call);
  if (!call.site) call.site = site_here();  // another thread may report its error
  auto message = std::make_shared<Message>(*this, std::move(call));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (message->call.op == Op::kSend)
    outgoing_[message->call.root].queue.push_back(message);
  else
    receives_.push_back(message);
  ++pending_;
  return message;
}

// Writes one slice of a send to its destination, which has room for it.
void PointToPoint::put(const Call& call, std::size_t total, const char* data, std::size_t nbytes) {
  const int destination = call.root;
  const Board board = group_.p2p_board(group_.rank(), destination);
  SendQueue& out = outgoing_[destination];
  const trace::Probe probe(group_.origin(), trace::SpanKind::kSendSlice, destination,
                           static_cast<std::int64_t>(out.ticket), nbytes);
  SlotHeader* header = board.header(out.ticket);
  header->signature.count = total;
  header->signature.root = call.tag;
  header->signature.dtype = static_cast<std::uint8_t>(call.dtype);
  char* slot = board.open(out.ticket, nbytes, out.cursor);
  const bool can_stream = nbytes >= kLeastStreamedBytes;
  const Flag* told = &group_.control(destination).p2p_read_costs[group_.rank()][cost_class(total)];
  const bool streaming = can_stream && out.writing.next(total, SlotCosts::unpacked(load_relaxed(told)));
  header->streamed = streaming;
  const auto write = [&] { kernels().copy(slot, data, nbytes, streaming); };
  if (can_stream && out.writing.measures(streaming, nbytes))
    out.writing.record(total, streaming, nbytes, ns_of(write));
  else
    write();
  if (streaming) drain_streaming_stores();
  store_then_look(&header->flag, ++out.ticket);
}

// Reads one slice of `source` that has arrived; with `to` null the slice is dropped.
void PointToPoint::take(int source, void* to, std::size_t nbytes, bool streaming) {
  ReceiveQueue& in = incoming_[source];
  const trace::Probe probe(group_.origin(), trace::SpanKind::kReceiveSlice, source,
                           static_cast<std::int64_t>(in.ticket), nbytes);
  const Board board = group_.p2p_board(source, group_.rank());
  const SlotHeader* header = board.header(in.ticket);
  const auto read = [&] { kernels().copy(to, board.payload(in.ticket), nbytes, streaming); };
  if (to && nbytes >= kLeastStreamedBytes && in.reading.measures(header->streamed, nbytes))
    in.reading.record(header->signature.count, header->streamed, nbytes, ns_of(read),
                      group_.control().p2p_read_costs[source]);
  else if (to)
    read();
  store_then_look(&group_.control().p2p_consumed[source].value, ++in.ticket);
}

// The fast path of a send: the complete message fits, and no other send is queued.
bool PointToPoint::send_now(const Call& call) {
  const std::size_t nbytes = call.count * element_bytes(call.dtype);
  const std::size_t slice = tuning::one_way_slice(nbytes, group_.p2p_slot_bytes());
  const std::uint64_t slices = larger(1, ceil_div(nbytes, slice));
  const std::lock_guard<std::mutex> lock(mutex_);
  SendQueue& out = outgoing_[call.root];
  if (slices > kP2pDepth || !out.queue.empty()) return false;
  const Flag* consumed = &group_.control(call.root).p2p_consumed[group_.rank()].value;
  if (load_acquire(consumed) < credit_needed(out.ticket + slices - 1, kP2pDepth)) return false;
  const auto* data = static_cast<const char*>(call.input);
  for (std::uint64_t i = 0; i < slices; ++i) put(call, nbytes, data + i * slice, smaller(slice, nbytes - i * slice));
  return true;
}

// The fast path of a receive: the message is one slice and comes next, and no other receive is open.
bool PointToPoint::receive_now(const Call& call) {
  const std::size_t nbytes = call.count * element_bytes(call.dtype);
  if (call.root == kAnySource || nbytes > tuning::kLeastSliceBytes) return false;
  const Board board = group_.p2p_board(call.root, group_.rank());
  for (int i = 0; i <= group_.wait_policy().spins; ++i, cpu_relax()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ReceiveQueue& in = incoming_[call.root];
    if (!receives_.empty() || in.current || in.unexpected || !in.arrived.empty()) return false;
    const SlotHeader* header = board.header(in.ticket);
    if (load_acquire(&header->flag) != in.ticket + 1) continue;
    const Signature& sent = header->signature;
    if (sent.root != call.tag || sent.count != nbytes || static_cast<DType>(sent.dtype) != call.dtype) return false;
    take(call.root, call.output, nbytes, false);
    return true;
  }
  return false;
}

int PointToPoint::run(const Call& call) {
  const trace::CallSpan span(group_.origin(), -1, call);
  group_.check_abort(call);
  if (call.op == Op::kSend ? send_now(call) : receive_now(call)) {
    group_.ring_bell(call.root);
    return call.root;
  }
  const MessagePtr message = enqueue(call);
  message->wait(0);
  return message->source();
}

std::shared_ptr<Request> PointToPoint::submit(Call call) {
  const MessagePtr message = enqueue(std::move(call));
  step();  // sends at once as much as possible
  if (message->done()) return message;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { progress(); });
  }
  changed_.notify_all();
  return message;
}

MessageInfo PointToPoint::probe(const Call& call) {
  const trace::CallSpan span(group_.origin(), -1, call);
  const MessagePtr message = enqueue(call);
  message->wait(0);
  return message->found;
}

// It is in no trace and no wait: the caller asks again and again.
std::optional<MessageInfo> PointToPoint::probe_now(const Call& call) {
  group_.check_abort(call);
  const auto message = std::make_shared<Message>(*this, call);
  for (int lost = -1;;) {
    step(message);
    if (message->done()) {
      message->wait(0);
      return message->found;
    }
    if (lost >= 0) report_lost(*message, lost);  // there was no last message of it either
    lost = lost_for(call);
    // A rank that has closed the communicator sends nothing more, so that there is no message; one that died is lost.
    if (lost < 0 || has_closed(group_, lost)) return std::nullopt;
  }
}

// Moves everything that can be moved now, for all messages of this rank. `visitor`, a probe that does not wait, is in
// the queue for this step only.
bool PointToPoint::step(const MessagePtr& visitor) {
  bool moved = false;
  std::vector<MessagePtr> finished;
  std::exception_ptr error;  // no memory to store a message
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (visitor) receives_.push_back(visitor), ++pending_;
    try {
      moved = advance(finished);
    } catch (...) {
      error = std::current_exception();
    }
    pending_ -= finished.size();
    if (visitor && visitor->found.source < 0) {
      receives_.erase(std::find(receives_.begin(), receives_.end(), visitor));
      --pending_;
    }
  }
  for (const MessagePtr& message : finished) message->complete(message->wrong);
  if (!finished.empty()) group_.ring_bell(group_.rank());  // other threads of this rank may wait for them
  if (error) {
    group_.abort(concat("rank ", group_.rank(), " found no memory for a message"), ErrorCode::kAborted);
    fail_all(error);
  }
  return moved;
}

bool PointToPoint::advance(std::vector<MessagePtr>& finished) {
  bool moved = false;
  for (int peer = 0; peer < group_.world_size(); ++peer)
    if (!outgoing_[peer].queue.empty()) moved |= push(peer, finished);
  if (receives_.empty()) {
    for (int peer = 0; peer < group_.world_size(); ++peer)
      if (incoming_[peer].current || incoming_[peer].unexpected) moved |= pull(peer, finished);
    return moved;
  }
  moved |= match_arrived(finished);
  for (int peer = 0; peer < group_.world_size(); ++peer)
    if (incoming_[peer].current || incoming_[peer].unexpected || wanted(peer)) moved |= pull(peer, finished);
  return moved;
}

bool PointToPoint::push(int destination, std::vector<MessagePtr>& finished) {
  const Board board = group_.p2p_board(group_.rank(), destination);
  const Flag* consumed = &group_.control(destination).p2p_consumed[group_.rank()].value;
  SendQueue& out = outgoing_[destination];
  bool moved = false;
  while (!out.queue.empty() && load_acquire(consumed) >= credit_needed(out.ticket, board.depth)) {
    Message& message = *out.queue.front();
    const std::size_t now =
        smaller(message.nbytes - message.moved, tuning::one_way_slice(message.nbytes, group_.p2p_slot_bytes()));
    put(message.call, message.nbytes, static_cast<const char*>(message.call.input) + message.moved, now);
    message.moved += now;
    moved = true;
    if (message.moved == message.nbytes) {
      finished.push_back(std::move(out.queue.front()));
      out.queue.pop_front();
    }
  }
  if (moved) group_.ring_bell(destination);
  return moved;
}

bool PointToPoint::wanted(int source) const {
  for (const MessagePtr& receive : receives_)
    if (receive->call.root == source || receive->call.root == kAnySource) return true;
  return false;
}

// Takes the first receive that a message fits out of the queue; null: there is none. Probes that stand before it end
// with this message.
PointToPoint::MessagePtr PointToPoint::claim_receive(int source, int tag, DType dtype, std::size_t nbytes,
                                                     std::vector<MessagePtr>& finished) {
  for (auto it = receives_.begin(); it != receives_.end();) {
    if (!(*it)->fits(source, tag)) {
      ++it;
      continue;
    }
    MessagePtr first = std::move(*it);
    it = receives_.erase(it);
    first->came_from(source);
    if (first->call.op != Op::kProbe) return first;
    first->found = {source, dtype, nbytes};
    finished.push_back(std::move(first));
  }
  return nullptr;
}

// Finishes receives and probes whose message was stored earlier.
bool PointToPoint::match_arrived(std::vector<MessagePtr>& finished) {
  const std::size_t before = finished.size();
  for (int source = 0; source < group_.world_size(); ++source) {
    auto& arrived = incoming_[source].arrived;
    for (auto it = arrived.begin(); it != arrived.end();) {
      const MessagePtr receive = claim_receive(source, (*it)->tag, (*it)->dtype, (*it)->nbytes, finished);
      if (!receive) {
        ++it;
        continue;
      }
      if (receive->takes((*it)->nbytes, (*it)->dtype))
        kernels().copy(receive->call.output, (*it)->data.get(), receive->nbytes, false);
      else
        receive->wrong = wrong_message(receive->call, group_.rank(), source, (*it)->nbytes, (*it)->dtype);
      finished.push_back(receive);
      it = arrived.erase(it);
    }
  }
  return finished.size() != before;
}

// The next message of `source` has begun to arrive: finds its receive, or allocates memory to store it. Does neither if
// it was only probed and no other call waits for a message of this source.
void PointToPoint::begin(int source, std::vector<MessagePtr>& finished) {
  ReceiveQueue& in = incoming_[source];
  const Signature& s = group_.p2p_board(source, group_.rank()).header(in.ticket)->signature;
  const DType dtype = static_cast<DType>(s.dtype);
  MessagePtr receive = claim_receive(source, s.root, dtype, s.count, finished);
  if (!receive && !wanted(source)) return;
  if (receive && receive->takes(s.count, dtype)) {
    in.current = std::move(receive);
    return;
  }
  auto unexpected = std::make_unique<UnexpectedMessage>();
  unexpected->tag = s.root;
  unexpected->dtype = dtype;
  unexpected->nbytes = s.count;
  if (receive) {  // the complete message is dropped; later ones are not affected
    receive->wrong = wrong_message(receive->call, group_.rank(), source, s.count, dtype);
    finished.push_back(std::move(receive));
  } else {
    unexpected->data.reset(new char[larger(s.count, 1)]);
  }
  in.unexpected = std::move(unexpected);
}

bool PointToPoint::pull(int source, std::vector<MessagePtr>& finished) {
  const Board board = group_.p2p_board(source, group_.rank());
  ReceiveQueue& in = incoming_[source];
  bool moved = false;
  while ((in.current || in.unexpected || wanted(source)) &&
         load_acquire(&board.header(in.ticket)->flag) == in.ticket + 1) {
    if (!in.current && !in.unexpected) begin(source, finished);
    if (!in.current && !in.unexpected) break;
    const std::size_t nbytes = in.current ? in.current->nbytes : in.unexpected->nbytes;
    std::size_t& at = in.current ? in.current->moved : in.unexpected->filled;
    char* const to = in.current ? static_cast<char*>(in.current->call.output) : in.unexpected->data.get();
    const std::size_t now = smaller(nbytes - at, tuning::one_way_slice(nbytes, group_.p2p_slot_bytes()));
    take(source, to ? to + at : nullptr, now, nbytes >= tuning::kStreamOutputBytes);
    at += now;
    moved = true;
    if (at < nbytes) continue;
    if (in.current)
      finished.push_back(std::move(in.current));
    else if (in.unexpected->data)
      in.arrived.push_back(std::move(in.unexpected));
    in.unexpected = nullptr;
    in.current = nullptr;
    match_arrived(finished);
  }
  if (moved) group_.ring_bell(source);
  return moved;
}

void PointToPoint::fail_all(std::exception_ptr error) {
  std::vector<MessagePtr> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& out : outgoing_) ended.insert(ended.end(), out.queue.begin(), out.queue.end()), out.queue.clear();
    for (auto& in : incoming_)
      if (in.current) ended.push_back(std::move(in.current)), in.current = nullptr;
    ended.insert(ended.end(), receives_.begin(), receives_.end());
    receives_.clear();
    pending_ -= ended.size();
  }
  for (const MessagePtr& message : ended) message->complete(error);
}

// Returns a rank that is gone and without which the message cannot finish; -1: none.
int PointToPoint::lost_for(const Call& call) const {
  if (call.root != kAnySource) return group_.is_gone(call.root) ? call.root : -1;
  int lost = -1;
  for (int peer = 0; peer < group_.world_size(); ++peer) {
    if (peer == group_.rank()) continue;
    if (!group_.is_gone(peer)) return -1;  // it may still send
    if (lost < 0 || !has_closed(group_, peer)) lost = peer;
  }
  return lost;
}

// Returns why a rank is gone, and the rank whose end may have caused it.
std::string PointToPoint::end_of(int rank) const {
  const int cause = group_.cause_of(rank, false);
  const std::string own = concat(group_.why_gone(rank), ", after ", group_.last_call_of(rank));
  return cause == rank ? own : concat(own, ", and of ", group_.named(cause), ' ', group_.why_gone(cause));
}

// The beginning of an error: the expected message, and what has arrived from the peer.
std::string PointToPoint::expectation(const Message& message) const {
  const Call& call = message.call;
  const std::string peer = call.root == kAnySource ? "any rank" : group_.named(call.root);
  const std::string site = call.site && *call.site ? concat(" (", call.site, ")") : "";
  const bool probes = call.op == Op::kProbe;
  return concat(name(call.op), ": rank ", group_.rank(), site, " expected ", peer, " to ",
                call.op == Op::kSend ? "receive " : "send ", probes ? "a message" : concat(message.nbytes, " bytes"),
                " with tag ", call.tag, ", got ", probes ? "none" : std::to_string(message.moved));
}

// The end of an error of a receive or probe: names a message with another tag that has arrived; empty if there is none.
std::string PointToPoint::another_tag(const Call& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (call.op == Op::kSend) return "";
  for (int source = 0; source < group_.world_size(); ++source) {
    const auto& arrived = incoming_[source].arrived;
    if ((call.root == source || call.root == kAnySource) && !arrived.empty())
      return concat("; rank ", source, " has sent ", message_text(arrived.front()->nbytes, arrived.front()->dtype),
                    " with tag ", arrived.front()->tag, ": pass the same tag to both calls");
  }
  return "";
}

void PointToPoint::report_lost(const Message& message, int lost) {
  group_.fail_group(
      message.call, ErrorCode::kRankLost,
      concat(expectation(message), ", but ", end_of(lost), "; see its own output", another_tag(message.call)));
}

// Throws if this message can no longer succeed: the group is aborted, the peer is gone, or the call's limit has passed.
void PointToPoint::check(const Message& message) {
  const Call& call = message.call;
  group_.check_abort(call);
  if (const int lost = lost_for(call); lost >= 0 && !step() && queued(message)) report_lost(message, lost);
  if (message.deadline.passed() && queued(message)) {
    const bool circle = call.op == Op::kSend && group_.waits_in_circle(call.root);
    const std::string other = another_tag(call);
    group_.fail_group(
        call, ErrorCode::kTimeout,
        concat(expectation(message), call.root == kAnySource ? "" : " from it" + group_.held_up_by(call.root),
               ", within the timeout of ", message.deadline.timeout_ms / 1000.0, " s",
               circle           ? kAdviceToSenders
               : !other.empty() ? other
                                : "; see whether it has stalled or calls something else"));
  }
}

// Moves all messages until this one is done, or `timeout_ms` (if not 0) has passed.
void PointToPoint::wait(Message& message, std::int64_t timeout_ms) {
  Deadline limit_of_caller{&message.call, timeout_ms};
  const WaitPolicy policy = group_.wait_policy();
  Clock::time_point next{};
  const WaitKind kind = message.call.op == Op::kSend    ? WaitKind::kSend
                        : message.call.op == Op::kProbe ? WaitKind::kProbe
                                                        : WaitKind::kReceive;
  const std::int64_t limit_ms = timeout_ms > 0 ? 0 : message.deadline.timeout_ms;
  LongWait watch(group_, kind, message.call.root, limit_ms, &message, message.call.site);
  const auto over = [this](const Message*) { group_.wait_for(-1); };
  const std::unique_ptr<Message, decltype(over)> waits(&message, over);
  for (int idle = 0; !message.done(); ++idle) {
    if (step() || message.done()) {
      idle = 0;
      continue;
    }
    if (idle < policy.spins) {
      cpu_relax();
      continue;
    }
    group_.wait_for(message.call.root);
    try {
      watch.check([&] { return message.done(); });
      check(message);
    } catch (...) {
      fail_all(std::current_exception());
    }
    try {
      group_.check_interrupt(message.call, next);
    } catch (...) {
      fail_all(std::current_exception());
      while (!message.done()) yield();  // another thread is about to finish it
      throw;
    }
    if (timeout_ms > 0 && limit_of_caller.passed()) report_in_flight(message.call.op, group_.rank(), timeout_ms);
    if (idle < policy.spins + policy.yields)
      yield();
    else
      group_.sleep_by_bell([&] { return step() || message.done(); });
  }
}

// The caller holds the lock.
template <typename Visit>
void PointToPoint::for_each_pending(const Visit& visit) {
  for (const auto& receive : receives_) visit(receive);
  for (const auto& in : incoming_)
    if (in.current) visit(in.current);
  for (const auto& out : outgoing_)
    for (const auto& send : out.queue) visit(send);
}

bool PointToPoint::queued(const Message& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool found = false;
  for_each_pending([&](const MessagePtr& each) { found = found || each.get() == &message; });
  return found;
}

// Returns a message whose limit has passed, else any.
PointToPoint::MessagePtr PointToPoint::most_urgent() {
  const std::lock_guard<std::mutex> lock(mutex_);
  MessagePtr urgent;
  for_each_pending([&](const MessagePtr& each) {
    if (!urgent || (!urgent->deadline.passed() && each->deadline.passed())) urgent = each;
  });
  return urgent;
}

PointToPoint::MessagePtr PointToPoint::next_send() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& out : outgoing_)
    if (!out.queue.empty()) return out.queue.front();
  return nullptr;
}

bool PointToPoint::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pending_ == 0;
}

void PointToPoint::progress() {
  trace::set_role("messages");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (pending_ == 0) {
      changed_.wait(lock, [&] { return stopping_ || pending_ != 0; });
      continue;
    }
    lock.unlock();
    try {
      if (!step()) {
        if (const MessagePtr message = most_urgent()) check(*message);
        group_.sleep_by_bell([this] { return step(); });
      }
    } catch (const std::exception& error) {
      group_.abort(error.what(), ErrorCode::kAborted);
      fail_all(std::current_exception());
    }
    lock.lock();
  }
}

void PointToPoint::stop() {
  try {
    while (const MessagePtr message = next_send()) message->wait(0);
  } catch (const Error&) {
    // the message's owner gets the error from its request
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  fail_all(std::make_exception_ptr(Error(
      ErrorCode::kAborted,
      concat("close: rank ", group_.rank(), " ended a receive or a probe that was in flight; wait for it before"))));
}

}  // namespace ringcomm::cpu
