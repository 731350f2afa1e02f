#include "cuda/launch/copy_engine.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/check.h"
#include "core/parts.h"
#include "core/signature.h"
#include "cuda/launch/prepare.h"
#include "cuda/launch/stream_waits.h"

namespace ringcomm::cuda {

namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(20);  // between two checks whether awaited ranks are alive

Signature signature_of(const Call& call, int world_size, std::uint64_t number) {
  Signature signature{};
  signature.sequence = number;
  signature.count = agreed_count(call, world_size);
  signature.op = static_cast<std::uint8_t>(call.op);
  signature.dtype = static_cast<std::uint8_t>(call.dtype);
  signature.reduce_op = reduces(call.op) ? static_cast<std::uint8_t>(call.reduce_op) : 0;
  signature.algorithm = static_cast<std::uint8_t>(call.algorithm);
  signature.root = rooted(call.op) ? call.root : 0;
  return signature;
}

[[noreturn]] void mismatch(const Call& call, int rank, const Signature& mine, int peer, const Signature& theirs) {
  Status status{};
  status.code = static_cast<Flag>(Failure::kMismatch);
  status.peer = peer;
  status.mine = mine;
  status.theirs = theirs;
  throw explain(status, rank, name(call.op), 0);
}

}  // namespace

// ---- letters --------------------------------------------------------------------------------------------------------

std::string CopyCall::Letter::text() const {
  std::ostringstream out;
  out << signature.sequence << ' ' << signature.count << ' ' << int{signature.op} << ' ' << int{signature.dtype} << ' '
      << int{signature.reduce_op} << ' ' << int{signature.algorithm} << ' ' << signature.root << ' ' << part.arena
      << ' ' << part.where << ' ' << nbytes << ' ' << visible << ' ' << captured << ' ' << in_place << ' ' << able;
  return out.str();
}

bool CopyCall::Letter::read(const std::string& text) {
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

CopyCall::CopyCall(const std::vector<Row>& rows, std::size_t lead, std::uint64_t number)
    : rows_(rows), lead_(lead), number_(number), row_of_(static_cast<std::size_t>(world_size()), -1) {
  for (std::size_t y = 0; y < rows.size(); ++y) row_of_[rows[y].rank] = static_cast<int>(y);
}

Part CopyCall::given(std::size_t row, int to) const {
  const Call& mine = call(row);
  if (mine.op == Op::kAllGather) return {const_cast<void*>(mine.input), mine.count};
  const Parts input = input_parts(mine);
  return {input.data(to), input.count(to)};
}

Part CopyCall::taken(std::size_t row, int from) const {
  const Parts output = output_parts(call(row));
  return {output.data(from), output.count(from)};
}

// The letters of a row, by peer.
std::vector<CopyCall::Letter> CopyCall::write(std::size_t row) const {
  const Call& mine = call(row);
  Context& context = *rows_[row].context;
  const std::size_t element = element_bytes(mine.dtype);
  Letter common;
  common.signature = signature_of(mine, world_size(), number_);
  common.visible = true;
  common.captured = rows_[row].batch->capture != 0;
  common.in_place = mine.op == Op::kAllToAll && in_place(mine, world_size());
  common.able = context.has_word_ops();
  std::vector<Letter> letters(static_cast<std::size_t>(world_size()), common);
  const auto locate = [&](const void* data, std::size_t nbytes) {
    return context.group().locate(data, nbytes, common.captured, name(mine.op));
  };
  const bool one_piece = mine.input_parts.empty();  // looked up once
  const std::size_t pieces = mine.op == Op::kAllGather ? 1 : static_cast<std::size_t>(world_size());
  const Location whole = one_piece && mine.count ? locate(mine.input, pieces * mine.count * element) : Location{};
  for (int p = 0; p < world_size(); ++p) {
    const Part part = given(row, p);
    letters[p].nbytes = part.count * element;
    if (part.count == 0) continue;
    letters[p].part = one_piece ? whole : locate(part.data, part.count * element);
    if (one_piece) letters[p].part.where += static_cast<char*>(part.data) - static_cast<const char*>(mine.input);
    if (!letters[p].part.visible) common.visible = false;
  }
  for (Letter& letter : letters) letter.visible = common.visible;
  return letters;
}

// Every rank of this launch sends a letter to every rank elsewhere, and receives one from it.
void CopyCall::exchange(const std::vector<std::vector<Letter>>& letters) {
  struct Line {
    std::size_t row;
    int peer;
    bool sent = false, heard = false;
    bool nobody = false;  // the peer's mailbox is gone
    bool lost = false;    // it was gone at the last look: an abort would be known by the next
  };
  std::vector<Line> lines;
  for (std::size_t y = 0; y < rows_.size(); ++y)
    for (int p = 0; p < world_size(); ++p)
      if (!is_here(p)) lines.push_back({y, p});
  const Op op = call(lead_).op;
  const std::int64_t limit = rows_[lead_].batch->limit_ms;
  const auto end = Clock::now() + std::chrono::milliseconds(limit);
  for (auto look = Clock::now() + kBetweenLooks;;) {
    Line* open = nullptr;
    // A mailbox holds few letters, and a peer whose letter finds no room waits here too.
    for (const Row& row : rows_) row.context->group().read_letters();
    for (Line& line : lines) {
      Group& group = rows_[line.row].context->group();
      Mail mail;
      if (!line.sent) {
        mail.kind = Mail::kCopies;
        mail.from = group.rank();
        mail.call = number_;
        mail.text = letters[line.row][line.peer].text();
        const Mailbox::Sent sent = group.send(line.peer, mail);
        line.sent = sent == Mailbox::Sent::kYes;
        line.nobody = sent == Mailbox::Sent::kNobody;
      }
      const bool first = !open && !(line.sent && line.heard);
      if (!line.heard &&
          group.receive(Mail::kCopies, line.peer, std::numeric_limits<std::uint64_t>::max(), first ? 1 : 0, mail))
        line.heard = said_[line.row][line.peer].read(mail.text);
      if (!open && !(line.sent && line.heard)) open = &line;
    }
    if (!open) return;
    const auto now = Clock::now();
    Context& waiting = *rows_[open->row].context;
    for (const Row& row : rows_)
      if (row.context->ended()) row.context->raise_end(op);
    if (now >= end)
      fail(ErrorCode::kTimeout, name(op), ": rank ", waiting.rank(), " expected rank ", open->peer,
           " to come to this call within ", seconds(limit), ", got no answer; see whether it has stalled or calls ",
           "something else", kAdvice);
    if (now < look) continue;
    look = now + kBetweenLooks;
    const Process& process = waiting.group().process(open->peer);
    const bool exited = process.has_exited();
    if (open->lost)
      fail(ErrorCode::kRankLost, name(op), ": rank ", waiting.rank(), " expected rank ", open->peer, " (process ",
           process.pid, ") in this call, but ", exited ? "its process has exited" : "it has closed the communicator",
           "; see its own output", kAdvice);
    open->lost = open->nobody || exited;
    for (const Row& row : rows_) row.context->waits().add_look(row.context->group().stream());
  }
}

void CopyCall::compare(std::size_t row, const Letter& mine, int peer) const {
  const Letter& theirs = said_[row][peer];
  const int rank = rows_[row].rank;
  if (!(mine.signature == theirs.signature)) mismatch(call(row), rank, mine.signature, peer, theirs.signature);
  const std::uint64_t nbytes = taken(row, peer).count * element_bytes(call(row).dtype);
  if (call(row).op != Op::kAllToAll || theirs.nbytes == nbytes) return;
  Signature expected = mine.signature, got = mine.signature;  // if parts differ, the counts are bytes
  expected.count = kUneven | nbytes;
  got.count = kUneven | theirs.nbytes;
  mismatch(call(row), rank, expected, peer, got);
}

void CopyCall::check_no_letter(const std::vector<Row>& rows, std::uint64_t number) {
  for (const Row& row : rows) {
    Mail mail;
    Letter letter;
    if (!row.context->group().receive(Mail::kCopies, -1, number, 0, mail) || !letter.read(mail.text)) continue;
    const Call& mine = row.batch->first();
    mismatch(mine, row.rank, signature_of(mine, row.context->world_size(), number), mail.from, letter.signature);
  }
}

// ---- the decision ---------------------------------------------------------------------------------------------------

void CopyCall::refuse(int rank, const char* got, const char* advice) const {
  fail(ErrorCode::kUnsupported, name(call(lead_).op), ": rank ", context().rank(),
       " asked for algorithm copy_engine, got ", got, " on rank ", rank, "; ", advice);
}

bool CopyCall::agree() {
  if (context().setting().known) {
    for (std::size_t y = 0; y < rows_.size(); ++y)
      if (call(y).op == Op::kAllToAll && in_place(call(y), world_size())) return false;
    return true;
  }
  std::vector<std::vector<Letter>> letters;
  for (std::size_t y = 0; y < rows_.size(); ++y) letters.push_back(write(y));
  said_.assign(rows_.size(), std::vector<Letter>(static_cast<std::size_t>(world_size())));
  for (std::size_t y = 0; y < rows_.size(); ++y)
    for (int p = 0; p < world_size(); ++p)
      if (is_here(p)) said_[y][p] = letters[row_of_[p]][rows_[y].rank];
  exchange(letters);
  for (std::size_t y = 0; y < rows_.size(); ++y)
    for (int p = 0; p < world_size(); ++p)
      if (p != rows_[y].rank) compare(y, letters[y][p], p);
  bool all = true;
  const bool by_name = call(lead_).algorithm == Algorithm::kCopyEngine;
  for (int p = 0; p < world_size(); ++p) {
    const Letter& said = said_[lead_][p];
    if (by_name && said.captured)
      refuse(p, "a capture into a graph, whose replays cannot wait for the copies of other launches,",
             "use algorithm auto there");
    if (by_name && !said.able)
      refuse(p, "a device whose streams do not wait for words in memory (cuStreamBatchMemOp)", "use algorithm auto");
    all = all && said.visible && said.able && !said.captured && !said.in_place;
  }
  return all;
}

// ---- enqueueing -----------------------------------------------------------------------------------------------------

const char* CopyCall::source(std::size_t row, int from) const {
  if (is_here(from)) return static_cast<const char*>(given(row_of_[from], rows_[row].rank).data);
  const Location part = said_[row][from].part;
  if (part.arena < 0) return reinterpret_cast<const char*>(part.where);
  const char* const base = rows_[row].context->group().region(from, part.arena);
  if (!base)
    fail(ErrorCode::kSystem, name(call(row).op), ": rank ", rows_[row].rank, " expected memory of rank ", from,
         " to be mapped here, got none; see the errors of the other ranks");
  return base + part.where;
}

std::vector<WordOp> CopyCall::word_ops(std::uint32_t CopyWords::* word, bool waits) const {
  std::vector<WordOp> ops;
  for (const Row& row : rows_) {
    const Group& group = row.context->group();
    for (int p = 0; p < world_size(); ++p) {
      if (is_here(p)) continue;
      char* const at = waits ? group.segment(row.rank) + group.layout().copy_words_at(p)
                             : group.segment(p) + group.layout().copy_words_at(row.rank);
      ops.push_back({&(reinterpret_cast<CopyWords*>(at)->*word), ticket(), waits});
    }
  }
  return ops;
}

void CopyCall::enqueue() const {
  const Batch& batch = *rows_[lead_].batch;
  const int rank = context().rank();
  std::vector<Piece> pieces;
  for (std::size_t y = 0; y < rows_.size(); ++y)
    for (int i = 0; i < world_size(); ++i) {  // each rank begins with a different peer
      const int from = (rows_[y].rank + i) % world_size();
      const Part part = taken(y, from);
      const char* const data = part.count ? source(y, from) : nullptr;
      if (part.count && data != part.data)
        pieces.push_back({part.data, data, part.count * element_bytes(call(y).dtype)});
    }
  if (rows_.size() == row_of_.size()) return copy_pieces(pieces, batch.stream, batch.capture != 0, rank);
  const auto step = [&](std::uint32_t CopyWords::* word, bool waits) {
    enqueue_word_ops(word_ops(word, false), batch.stream, rank);
    if (waits) enqueue_word_ops(word_ops(word, true), batch.stream, rank);
  };
  const MarkPtr begin = context().marks().record(batch.stream, batch.capture, rank);
  const auto look_after = [&] {
    const MarkPtr end = context().marks().record(batch.stream, batch.capture, rank);
    for (const Row& row : rows_) row.context->waits().add({batch.first().op, ticket(), batch.limit_ms, begin, end});
  };
  try {
    step(&CopyWords::ready, RINGCOMM_FAULT != Fault::kCopyBeforeReady);
    copy_pieces(pieces, batch.stream, false, rank);
    step(&CopyWords::done, RINGCOMM_FAULT != Fault::kGoOnBeforeDone);
    for (const Row& row : rows_) row.context->waits().add_look(batch.stream);
  } catch (const Error& error) {
    look_after();
    throw Error(ErrorCode::kSystem, error.what());  // never kUnsupported, after which ranks go on: a part is enqueued
  }
  look_after();
}

}  // namespace ringcomm::cuda
