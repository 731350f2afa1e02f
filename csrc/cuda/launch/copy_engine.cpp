#include "cuda/launch/copy_engine.h"

#include <limits>
#include <sstream>

#include "core/call/check.h"
#include "core/call/parts.h"
#include "core/call/signature.h"
#include "cuda/launch/builder.h"
#include "cuda/launch/stream_waits.h"

namespace ringcomm::cuda {

namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(20);  // between two checks whether awaited ranks are alive

[[noreturn]] void mismatch(const Call& call, int rank, const Signature& mine, int peer, const Signature& theirs) {
  Status status{};
  status.code = static_cast<Flag>(Failure::kMismatch);
  status.peer = peer;
  status.mine = mine;
  status.theirs = theirs;
  throw explain(status, rank, name(call.op), 0);
}

}  // namespace

// ---- what the ranks tell each other ---------------------------------------------------------------------------------

std::string CopyCall::CallInfo::text() const {
  std::ostringstream out;
  out << signature.sequence << ' ' << signature.count << ' ' << int{signature.op} << ' ' << int{signature.dtype} << ' '
      << int{signature.reduce_op} << ' ' << int{signature.algorithm} << ' ' << signature.root << ' ' << part.arena
      << ' ' << part.where << ' ' << nbytes << ' ' << visible << ' ' << captured << ' ' << in_place << ' ' << able;
  return out.str();
}

bool CopyCall::CallInfo::read(const std::string& text) {
  std::istringstream in(text);
  int op = 0, dtype = 0, reduce_op = 0, algorithm = 0;
  in >> signature.sequence >> signature.count >> op >> dtype >> reduce_op >> algorithm >> signature.root >>
      part.arena >> part.where >> nbytes >> visible >> captured >> in_place >> able;
  signature.op = static_cast<std::uint8_t>(op);
  signature.dtype = static_cast<std::uint8_t>(dtype);
  signature.reduce_op = static_cast<std::uint8_t>(reduce_op);
  signature.algorithm = static_cast<std::uint8_t>(algorithm);
  return !in.fail();
}

CopyCall::CopyCall(const std::vector<LaunchMember>& members, std::size_t lead, std::uint64_t number)
    : members_(members), lead_(lead), number_(number), member_of_(static_cast<std::size_t>(world_size()), -1) {
  for (std::size_t y = 0; y < members.size(); ++y) member_of_[members[y].rank] = static_cast<int>(y);
}

Part CopyCall::given(std::size_t member, int to) const {
  const Call& mine = call(member);
  if (mine.op == Op::kAllGather) return {const_cast<void*>(mine.input), mine.count};
  const Parts input = input_parts(mine);
  return {input.data(to), input.count(to)};
}

Part CopyCall::taken(std::size_t member, int from) const {
  const Parts output = output_parts(call(member));
  return {output.data(from), output.count(from)};
}

// The messages of a member to each peer.
std::vector<CopyCall::CallInfo> CopyCall::write(std::size_t member) const {
  const Call& mine = call(member);
  Context& context = *members_[member].context;
  const std::size_t element = element_bytes(mine.dtype);
  CallInfo common;
  common.signature = signature_of(mine, world_size(), number_);
  common.visible = true;
  common.captured = members_[member].batch->capture != 0;
  common.in_place = mine.op == Op::kAllToAll && in_place(mine, world_size());
  common.able = context.has_word_ops();
  std::vector<CallInfo> infos(static_cast<std::size_t>(world_size()), common);
  const auto locate = [&](const void* data, std::size_t nbytes) {
    return context.peer_memory().locate(data, nbytes, common.captured, name(mine.op));
  };
  const bool one_piece = mine.input_parts.empty();  // looked up once
  const std::size_t pieces = mine.op == Op::kAllGather ? 1 : static_cast<std::size_t>(world_size());
  const Location whole = one_piece && mine.count ? locate(mine.input, pieces * mine.count * element) : Location{};
  for (int p = 0; p < world_size(); ++p) {
    const Part part = given(member, p);
    infos[p].nbytes = part.count * element;
    if (part.count == 0) continue;
    infos[p].part = one_piece ? whole : locate(part.data, part.count * element);
    if (one_piece) infos[p].part.where += static_cast<char*>(part.data) - static_cast<const char*>(mine.input);
    if (!infos[p].part.visible) common.visible = false;
  }
  for (CallInfo& info : infos) info.visible = common.visible;
  return infos;
}

// Every rank of this launch sends a message to every rank elsewhere, and receives one from it.
void CopyCall::exchange(const std::vector<std::vector<CallInfo>>& infos) {
  struct Item {
    std::size_t member;
    int peer;
    bool sent = false, received = false;
    bool unreachable = false;  // the peer's socket is gone
    bool lost = false;         // it was gone at the last look: an abort would be known by the next
  };
  std::vector<Item> items;
  for (std::size_t y = 0; y < members_.size(); ++y)
    for (int p = 0; p < world_size(); ++p)
      if (!is_here(p)) items.push_back({y, p});
  const Op op = call(lead_).op;
  const std::int64_t limit = members_[lead_].batch->limit_ms;
  const auto end = Clock::now() + std::chrono::milliseconds(limit);
  for (auto check_at = Clock::now() + kCheckInterval;;) {
    Item* open = nullptr;
    // A socket's queue holds few messages, and a peer whose message finds no room waits here too.
    for (const LaunchMember& member : members_) member.context->peer_memory().read_messages();
    for (Item& item : items) {
      PeerMemory& memory = members_[item.member].context->peer_memory();
      ControlMessage message;
      if (!item.sent) {
        message.kind = ControlMessage::kCopies;
        message.from = memory.rank();
        message.call = number_;
        message.text = infos[item.member][item.peer].text();
        const ControlSocket::SendResult sent = memory.send(item.peer, message);
        item.sent = sent == ControlSocket::SendResult::kSent;
        item.unreachable = sent == ControlSocket::SendResult::kUnreachable;
      }
      const bool first = !open && !(item.sent && item.received);
      if (!item.received && memory.receive(ControlMessage::kCopies, item.peer,
                                           std::numeric_limits<std::uint64_t>::max(), first ? 1 : 0, message))
        item.received = infos_[item.member][item.peer].read(message.text);
      if (!open && !(item.sent && item.received)) open = &item;
    }
    if (!open) return;
    const auto now = Clock::now();
    Context& waiting = *members_[open->member].context;
    for (const LaunchMember& member : members_)
      if (member.context->ended()) member.context->raise_end(op);
    if (now >= end)
      fail(ErrorCode::kTimeout, name(op), ": rank ", waiting.rank(), " expected rank ", open->peer,
           " to come to this call within ", seconds(limit), ", got no answer; see whether it has stalled or calls ",
           "something else", kAdvice);
    if (now < check_at) continue;
    check_at = now + kCheckInterval;
    const Process& process = waiting.peer_memory().process(open->peer);
    const bool exited = process.has_exited();
    if (open->lost)
      fail(ErrorCode::kRankLost, name(op), ": rank ", waiting.rank(), " expected rank ", open->peer, " (process ",
           process.pid, ") in this call, but ", exited ? "its process has exited" : "it has closed the communicator",
           "; see its own output", kAdvice);
    open->lost = open->unreachable || exited;
    for (const LaunchMember& member : members_)
      member.context->waits().copy_abort_flag(member.context->peer_memory().stream());
  }
}

void CopyCall::compare(std::size_t member, const CallInfo& mine, int peer) const {
  const CallInfo& theirs = infos_[member][peer];
  const int rank = members_[member].rank;
  if (!(mine.signature == theirs.signature)) mismatch(call(member), rank, mine.signature, peer, theirs.signature);
  const std::uint64_t nbytes = taken(member, peer).count * element_bytes(call(member).dtype);
  if (call(member).op != Op::kAllToAll || theirs.nbytes == nbytes) return;
  Signature expected = mine.signature, got = mine.signature;  // if parts differ, the counts are bytes
  expected.count = kUneven | nbytes;
  got.count = kUneven | theirs.nbytes;
  mismatch(call(member), rank, expected, peer, got);
}

void CopyCall::check_no_copy_call(const std::vector<LaunchMember>& members, std::uint64_t number) {
  for (const LaunchMember& member : members) {
    ControlMessage message;
    CallInfo info;
    if (!member.context->peer_memory().receive(ControlMessage::kCopies, -1, number, 0, message) ||
        !info.read(message.text))
      continue;
    const Call& mine = member.batch->first();
    mismatch(mine, member.rank, signature_of(mine, member.context->world_size(), number), message.from, info.signature);
  }
}

// ---- the decision ---------------------------------------------------------------------------------------------------

void CopyCall::refuse(int rank, const char* got, const char* advice) const {
  fail(ErrorCode::kUnsupported, name(call(lead_).op), ": rank ", context().rank(),
       " asked for algorithm copy_engine, got ", got, " on rank ", rank, "; ", advice);
}

bool CopyCall::agree() {
  if (context().setting().known) {
    for (std::size_t y = 0; y < members_.size(); ++y)
      if (call(y).op == Op::kAllToAll && in_place(call(y), world_size())) return false;
    return true;
  }
  std::vector<std::vector<CallInfo>> infos;
  for (std::size_t y = 0; y < members_.size(); ++y) infos.push_back(write(y));
  infos_.assign(members_.size(), std::vector<CallInfo>(static_cast<std::size_t>(world_size())));
  for (std::size_t y = 0; y < members_.size(); ++y)
    for (int p = 0; p < world_size(); ++p)
      if (is_here(p)) infos_[y][p] = infos[member_of_[p]][members_[y].rank];
  exchange(infos);
  for (std::size_t y = 0; y < members_.size(); ++y)
    for (int p = 0; p < world_size(); ++p)
      if (p != members_[y].rank) compare(y, infos[y][p], p);
  bool all = true;
  const bool by_name = call(lead_).algorithm == Algorithm::kCopyEngine;
  for (int p = 0; p < world_size(); ++p) {
    const CallInfo& info = infos_[lead_][p];
    if (by_name && info.captured)
      refuse(p, "a capture into a graph, whose replays cannot wait for the copies of other launches,",
             "use algorithm auto there");
    if (by_name && !info.able)
      refuse(p, "a device whose streams do not wait for words in memory (cuStreamBatchMemOp)", "use algorithm auto");
    all = all && info.visible && info.able && !info.captured && !info.in_place;
  }
  return all;
}

// ---- enqueueing -----------------------------------------------------------------------------------------------------

const char* CopyCall::source(std::size_t member, int from) const {
  if (is_here(from)) return static_cast<const char*>(given(member_of_[from], members_[member].rank).data);
  const Location part = infos_[member][from].part;
  if (part.arena < 0) return reinterpret_cast<const char*>(part.where);
  const char* const base = members_[member].context->peer_memory().region(from, part.arena);
  if (!base)
    fail(ErrorCode::kSystem, name(call(member).op), ": rank ", members_[member].rank, " expected memory of rank ", from,
         " to be mapped here, got none; see the errors of the other ranks");
  return base + part.where;
}

std::vector<WordOp> CopyCall::word_ops(std::uint32_t CopyWords::* word, bool waits) const {
  std::vector<WordOp> ops;
  for (const LaunchMember& member : members_) {
    const PeerMemory& memory = member.context->peer_memory();
    for (int p = 0; p < world_size(); ++p) {
      if (is_here(p)) continue;
      char* const at = waits ? memory.segment(member.rank) + memory.layout().copy_words_at(p)
                             : memory.segment(p) + memory.layout().copy_words_at(member.rank);
      ops.push_back({&(reinterpret_cast<CopyWords*>(at)->*word), ticket(), waits});
    }
  }
  return ops;
}

void CopyCall::enqueue() const {
  const Batch& batch = *members_[lead_].batch;
  const int rank = context().rank();
  std::vector<Piece> pieces;
  for (std::size_t y = 0; y < members_.size(); ++y)
    for (int i = 0; i < world_size(); ++i) {  // each rank begins with a different peer
      const int from = (members_[y].rank + i) % world_size();
      const Part part = taken(y, from);
      const char* const data = part.count ? source(y, from) : nullptr;
      if (part.count && data != part.data)
        pieces.push_back({part.data, data, part.count * element_bytes(call(y).dtype)});
    }
  if (members_.size() == member_of_.size()) return copy_pieces(pieces, batch.stream, batch.capture != 0, rank);
  const cudaStream_t stream = context().copy_stream(batch.stream);
  const auto step = [&](std::uint32_t CopyWords::* word, bool waits) {
    enqueue_word_ops(word_ops(word, false), stream, rank);
    if (waits) enqueue_word_ops(word_ops(word, true), stream, rank);
  };
  const StreamEventPtr begin = context().events().record(batch.stream, batch.capture, rank);
  if (stream != batch.stream) StreamEvents::follow(stream, batch.capture, begin, rank);
  const auto add_waits = [&] {
    const StreamEventPtr end = context().events().record(stream, batch.capture, rank);
    if (stream != batch.stream) StreamEvents::follow(batch.stream, batch.capture, end, rank);
    for (const LaunchMember& member : members_)
      member.context->waits().add({batch.first().op, ticket(), batch.limit_ms, begin, end});
  };
  try {
    step(&CopyWords::ready, RINGCOMM_FAULT != Fault::kCopyBeforeReady);
    copy_pieces(pieces, stream, false, rank);
    step(&CopyWords::done, RINGCOMM_FAULT != Fault::kGoOnBeforeDone);
    for (const LaunchMember& member : members_) member.context->waits().copy_abort_flag(stream);
  } catch (const Error& error) {
    add_waits();
    throw Error(ErrorCode::kSystem, error.what());  // never kUnsupported, after which ranks go on: a part is enqueued
  }
  add_waits();
}

}  // namespace ringcomm::cuda
