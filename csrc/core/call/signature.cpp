#include "core/call/signature.h"

#include <utility>

#include "core/call/check.h"
#include "core/call/parts.h"

namespace ringcomm {

namespace {

Op op_of(const Signature& s) { return static_cast<Op>(s.op); }

std::string elements(const Signature& s) {
  const std::string count = s.count & kUneven ? std::string("uneven parts of ") : concat(s.count, " x ");
  return count + name(static_cast<DType>(s.dtype));
}

template <typename Field>
bool differ(const std::vector<Caller>& callers, const Field& field) {
  for (const Caller& caller : callers)
    if (field(caller.signature) != field(callers[0].signature)) return true;
  return false;
}

// The arguments of a rank, for an op that all callers called: the elements, and other properties where they differ.
std::string passed(const Signature& s, const std::vector<Caller>& callers) {
  std::string text = elements(s);
  if (differ(callers, [](const Signature& each) { return each.reduce_op; }))
    text += concat(", ", name(static_cast<ReduceOp>(s.reduce_op)));
  if (differ(callers, [](const Signature& each) { return each.root; })) text += root_text(s);
  if (differ(callers, [](const Signature& each) { return each.algorithm; }))
    text += concat(", algorithm ", name(static_cast<Algorithm>(s.algorithm)));
  if (s.count & kUneven && !differ(callers, [](const Signature& each) { return each.dtype; }))
    text += " (other counts)";
  return text;
}

std::string named(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += concat(i ? ", " : "", ranks[i]);
  return text;
}

}  // namespace

const char* name_of(Op op, int root) {
  if (op == Op::kBarrier && root) return "barrier before a gather";
  if (!is_scan(op, root)) return name(op);
  return root & 1 ? "exscan" : "scan";
}

std::string other_counts(int root, int rank, std::uint64_t expected, int peer, std::uint64_t sent, const char* unit) {
  return concat(name_of(Op::kAllToAll, root), ": rank ", rank, " expected ", expected, ' ', unit, " from rank ", peer,
                ", which sends ", sent,
                is_scan(Op::kAllToAll, root) ? "; every rank must pass the same number of elements"
                                             : "; recv_counts must mirror the senders' counts");
}

std::string root_text(const Signature& s) {
  if (rooted(op_of(s))) return concat(", root ", s.root);
  return marked(op_of(s)) && op_of(s) != Op::kBarrier && s.root ? concat(", mark ", s.root) : "";
}

std::string describe(const Signature& s) {
  const Op op = op_of(s);
  if (is_scan(op, s.root))
    return concat(name_of(op, s.root), '(', name(static_cast<DType>((s.root - kScan) >> 8)), ", ",
                  name(static_cast<ReduceOp>(s.root >> 1 & 127)), ')');
  if (op == Op::kBarrier) return name_of(op, s.root);
  std::string text = concat(name(op), '(', elements(s));
  if (reduces(op)) text += concat(", ", name(static_cast<ReduceOp>(s.reduce_op)));
  text += root_text(s);
  if (point_to_point(op)) return text + concat(", tag ", s.root, ')');
  return text + concat(", ", name(static_cast<Algorithm>(s.algorithm)), ')');
}

Signature signature_of(const Call& call, int world_size, std::uint64_t sequence, std::uint64_t history) {
  Signature s{};
  s.sequence = sequence;
  s.history = history;
  s.count = point_to_point(call.op) ? call.count : agreed_count(call, world_size);
  s.op = static_cast<std::uint8_t>(call.op);
  s.dtype = static_cast<std::uint8_t>(call.dtype);
  s.reduce_op = static_cast<std::uint8_t>(reduces(call.op) ? call.reduce_op : ReduceOp::kSum);
  s.algorithm = static_cast<std::uint8_t>(call.algorithm);
  s.root = point_to_point(call.op) ? call.tag : agreed_root(call);
  return s;
}

std::string describe(const Call& call, int world_size) { return describe(signature_of(call, world_size)); }

std::string difference(const std::vector<Caller>& callers) {
  const bool same_op = !differ(callers, [](const Signature& each) {
    const bool is_named = is_scan(op_of(each), each.root) || op_of(each) == Op::kBarrier;
    return std::pair(each.op, is_named ? each.root : 0);
  });
  const bool gathers = same_op && op_of(callers[0].signature) == Op::kAllGather;  // its count is that of the output
  std::vector<std::pair<std::string, std::vector<int>>> groups;                   // in the order of their first ranks
  for (const Caller& caller : callers) {
    std::string said = same_op ? concat(gathers ? "gathered " : "passed ", passed(caller.signature, callers))
                               : concat("called ", describe(caller.signature));
    if (!caller.site.empty()) said += concat(" (", caller.site, ')');
    auto group = groups.begin();
    while (group != groups.end() && group->first != said) ++group;
    if (group == groups.end()) group = groups.insert(group, {said, {}});
    group->second.push_back(caller.rank);
  }
  const Signature& first = callers[0].signature;
  std::string text = same_op ? concat(name_of(op_of(first), first.root), " #", first.sequence, ": ")
                             : concat("call #", first.sequence, ": ");
  for (std::size_t i = 0; i < groups.size(); ++i)
    text += concat(i ? ", " : "", named(groups[i].second), ' ', groups[i].first);
  if (gathers && first.root == 0 && !differ(callers, [](const Signature& each) { return each.root; }) &&
      differ(callers, [](const Signature& each) { return each.count; }))
    text += "; all_gather_list gathers parts of different sizes";
  return text;
}

}  // namespace ringcomm
