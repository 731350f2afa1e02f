#include "hierarchy/collectives.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>

#include "core/call/check.h"
#include "core/call/signature.h"
#include "core/error.h"
#include "runtime/observe/trace.h"

namespace ringcomm::hierarchy {

namespace {

constexpr std::size_t kWaveBytes = 128 << 20;  // of sums in scratch memory at once
constexpr std::chrono::milliseconds kInsideLonger{500};

DType sum_type(DType dtype) { return is_float(dtype) && element_bytes(dtype) < 4 ? DType::kFloat32 : dtype; }

// The bytes of a CallSignature: the properties of a call that two ranks must agree on, and the number of bytes that go
// between them.
struct SignatureFields {
  Signature signature;
  std::uint64_t upward, downward;  // bytes from the lower rank to the higher, and back (uneven all_to_all)
  std::uint64_t slice_bytes;
  std::uint8_t compressed, wire, unused[6];
};

// Returns the bytes of a CallSignature as text for an error message.
std::string describe(const std::string& bytes) {
  SignatureFields fields;
  if (bytes.size() < sizeof fields) return "something else";
  std::memcpy(&fields, bytes.data(), sizeof fields);
  const Signature& s = fields.signature;
  const Op op = static_cast<Op>(s.op);
  const bool scans = is_scan(op, s.root);
  std::string text = concat(scans ? ringcomm::describe(s) : name_of(op, s.root), " #", s.sequence);
  if (op != Op::kBarrier && !scans) {
    text += concat(" of ", s.count & ~kUneven, s.count & kUneven ? " (uneven) x " : " x ",
                   name(static_cast<DType>(s.dtype)));
    if (reduces(op)) text += concat(", ", name(static_cast<ReduceOp>(s.reduce_op)));
    if (s.algorithm) text += concat(", ", name(static_cast<Algorithm>(s.algorithm)));
  }
  if (!scans) text += root_text(s);
  if (fields.upward || fields.downward)
    text += concat(", ", fields.upward, " bytes to the higher rank and ", fields.downward, " back");
  if (fields.compressed) text += concat(", sent as ", name(static_cast<DType>(fields.wire)));
  return text;
}

}  // namespace

Collectives::Collectives(Topology topology, std::shared_ptr<Engine> local, std::shared_ptr<Transport> transport,
                         Options options)
    : topology_(std::move(topology)),
      local_(std::move(local)),
      transport_(std::move(transport)),
      options_(std::move(options)) {}

Collectives::~Collectives() {
  if (scratch_) transport_->release(scratch_);
}

void Collectives::run(const Call& call, TransportClock::time_point limit) {
  const DType sum = sum_type(call.dtype);
  const WireTypes types{sum, call.dtype, options_.compressed && reduces(call.op), options_.wire};
  const bool averages = call.reduce_op == ReduceOp::kAvg;
  const Scope scope{call,
                    limit,
                    types,
                    element_bytes(call.dtype),
                    element_bytes(sum),
                    call.algorithm == Algorithm::kRing ? InterHostSchedule::kRing : topology_.in_order(),
                    averages ? ReduceOp::kAvg : combine_of(call.reduce_op),
                    averages ? topology_.world_size() : 1};
  ++calls_;
  const bool at_once = call.op == Op::kAllReduce && fits_signature(scope);
  if (reduces(call.op) || call.op == Op::kAllGather)
    note_algorithm(scope, at_once ? Algorithm::kOneshot : algorithm_of(scope.schedule));
  switch (call.op) {
    case Op::kAllReduce:
      return at_once ? all_reduce_at_once(scope) : all_reduce(scope);
    case Op::kReduce:
      return reduce(scope);
    case Op::kReduceScatter:
      return reduce_scatter(scope);
    case Op::kAllGather:
      return all_gather(scope);
    case Op::kBroadcast:
      return broadcast(scope);
    case Op::kBarrier:
      return barrier(scope);
    default:
      return exchange(scope);
  }
}

void Collectives::note_algorithm(const Scope& scope, Algorithm used) const {
  trace::chose(used);
  count_algorithm(algorithm_counts_.get(), scope.call.op, scope.call.algorithm, used);
}

// ---- shared by all collectives

char* Collectives::scratch(std::size_t nbytes) {
  if (nbytes > scratch_bytes_) {
    if (scratch_) transport_->release(std::exchange(scratch_, nullptr));
    scratch_bytes_ = 0;
    nbytes += nbytes / 2;  // so that messages that grow a little each time do not allocate each time
    scratch_ = static_cast<char*>(transport_->allocate(nbytes));
    scratch_bytes_ = nbytes;
  }
  return scratch_;
}

std::size_t Collectives::slice_elements(std::size_t count, int chunks, std::size_t element) const {
  SliceSizes slicing = kSlicing;
  if (options_.slice_bytes) slicing.most = slicing.least = options_.slice_bytes;
  return cut_between(count, chunks, slicing, element, align_of(element)).slice_elements;
}

Call Collectives::local_call(const Scope& scope, Op op) const {
  using std::chrono::duration_cast;
  using std::chrono::milliseconds;
  Call call;
  call.op = op;
  call.dtype = scope.call.dtype;
  call.reduce_op = scope.call.reduce_op == ReduceOp::kAvg ? ReduceOp::kSum : scope.call.reduce_op;
  call.factor = scope.call.factor;
  call.stream = scope.call.stream;
  // A local rank may wait for another host until the limit, and should be the one to report it: so others wait longer.
  const auto left = duration_cast<milliseconds>(scope.limit - TransportClock::now()) + kInsideLonger;
  call.timeout_ms = std::max<std::int64_t>(1, left.count());
  return call;
}

// Runs calls on the host's engine. Its errors count the host's ranks from 0, so the message names the global ranks.
void Collectives::run_inside(const std::vector<Call>& calls) {
  try {
    if (calls.size() == 1)
      local_->run(calls[0]);
    else
      local_->run_list(calls);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kAborted) throw;
    std::string ranks;
    for (const int rank : topology_.ranks(topology_.host())) ranks += concat(ranks.empty() ? "" : ", ", rank);
    throw Error(error.code(), concat("rank ", topology_.rank(), " on host ", options_.names[topology_.host()],
                                     ", where ranks ", ranks, " count from 0: ", error.what()));
  }
}

std::vector<int> Collectives::partners(InterHostSchedule schedule,
                                       const std::vector<std::vector<int>>& rail_ranks) const {
  const int hosts = topology_.num_hosts(), me = topology_.host();
  std::set<int> peers;
  for (const auto& rail : rail_ranks)
    for (int round = 0; round < num_rounds(schedule, hosts); ++round)
      for (int i = 0; i < num_hops(schedule, hosts); ++i) {
        peers.insert(rail[sent(schedule, hosts, me, round, i).peer]);
        peers.insert(rail[received(schedule, hosts, me, round, i).peer]);
      }
  return {peers.begin(), peers.end()};
}

// Before any message of a call: checks that both ends make the same call.
std::vector<std::string> Collectives::agree(const Scope& scope, const std::vector<int>& peers,
                                            const std::string& payload) {
  const Call& call = scope.call;
  SignatureFields fields{};
  fields.signature = signature_of(call, topology_.world_size(), calls_ - 1, history_);
  history_ = fields.signature.hash();
  fields.slice_bytes = options_.slice_bytes;
  fields.compressed = scope.types.compressed;
  fields.wire = static_cast<std::uint8_t>(scope.types.compressed ? options_.wire : DType::kFloat32);
  const Parts in = input_parts(call), out = output_parts(call);
  std::vector<CallSignature> signatures;
  for (const int peer : peers) {
    if (call.op == Op::kAllToAll) {
      const std::uint64_t to = in.count(peer) * scope.element, from = out.count(peer) * scope.element;
      fields.upward = topology_.rank() < peer ? to : from;
      fields.downward = topology_.rank() < peer ? from : to;
    }
    std::string mine(reinterpret_cast<const char*>(&fields), sizeof fields);
    if (topology_.local_of(peer) == 0) mine += payload;
    signatures.push_back({peer, std::move(mine)});
  }
  const trace::Probe probe(trace::SpanKind::kAgree);
  std::vector<std::string> theirs = transport_->swap(signatures, scope.limit, call.stream);
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    if (theirs[i].size() != signatures[i].mine.size() ||
        std::memcmp(theirs[i].data(), signatures[i].mine.data(), sizeof fields))
      fail(ErrorCode::kMismatch, difference(signatures[i].peer, signatures[i].mine, theirs[i]));
    theirs[i].erase(0, sizeof fields);
  }
  return theirs;
}

std::string Collectives::difference(int peer, const std::string& mine, const std::string& theirs) const {
  return concat("rank ", topology_.rank(), " on host ", options_.names[topology_.host()], " made ", describe(mine),
                ", rank ", peer, " on host ", options_.names[topology_.host_of(peer)], " made ", describe(theirs),
                "; make the same calls in the same order on every rank");
}

RailPlans Collectives::plans_of(const Scope& scope, const Rail& rail) const {
  const int halves = (rail.reduces ? 1 : 0) + (rail.gathers ? 1 : 0);
  return {rail.number, (rail.reduces ? rail.sums : rail.results).windows(),
          halves * reducing_rounds(rail.schedule, topology_.num_hosts()), scratch_bytes(rail),
          [this, &rail, stream = scope.call.stream](std::size_t window, char* memory) {
            return build_plan(topology_, rail, window, memory, stream);
          }};
}

void Collectives::run_rails(const Scope& scope, const std::vector<Rail>& rails, char* scratch) {
  std::vector<RailPlans> lists;
  for (const Rail& rail : rails) lists.push_back(plans_of(scope, rail));
  run_plans(*local_, *transport_, lists, scratch, scope.limit, scope.call.stream);
}

// Runs a single round of messages.
void Collectives::run_round(const Scope& scope, ExchangeRound round) {
  const RailPlans once{0, 1, 1, 0, [&](std::size_t, char*) { return ExchangePlan{round}; }};
  run_plans(*local_, *transport_, {once}, nullptr, scope.limit, scope.call.stream);
}

// On this host: gathers the elements of each rank's rails on all of its ranks.
void Collectives::gather_inside(const Scope& scope, const Cut& cut, char* data) {
  if (topology_.local_world_size() == 1) return;
  Call call = local_call(scope, Op::kAllGather);
  call.output_parts = cut.parts(data, scope.element);
  call.input = call.output_parts[topology_.local_rank()].data;
  call.count = cut.mine().count;
  run_inside({call});
}

void Collectives::copy(const Scope& scope, const void* source, void* target, std::size_t count) {
  const DType dtype = scope.call.dtype;
  if (source != target && count) local_->pack({dtype, dtype, 1.0, {{source, target, count}}, scope.call.stream});
}

// For messages with a part for each rank: the rail's rank on every host; and of all rails of this rank.
std::vector<int> Collectives::part_rail_ranks(int rail) const {
  std::vector<int> ranks;
  for (int h = 0; h < topology_.num_hosts(); ++h) ranks.push_back(topology_.part_rail_rank(h, rail));
  return ranks;
}
std::vector<std::vector<int>> Collectives::part_rail_ranks() const {
  std::vector<std::vector<int>> all;
  for (int l = topology_.local_rank(); l < topology_.rails(); l += topology_.local_world_size())
    all.push_back(part_rail_ranks(l));
  return all;
}

// Returns chunks such that the schedule leaves every host with its own part.
Chunks Collectives::by_chunk(InterHostSchedule schedule, const std::vector<Part>& of_host, std::size_t slice,
                             std::size_t element) const {
  std::vector<Part> parts;
  for (int c = 0; c < topology_.num_hosts(); ++c)
    parts.push_back(of_host[owner_of_chunk(schedule, topology_.num_hosts(), c)]);
  return Chunks::pieces(std::move(parts), slice, element);
}
Chunks Collectives::part_chunks(InterHostSchedule schedule, const std::vector<Part>& of_host,
                                std::size_t element) const {
  std::size_t longest = 0;
  for (const Part& part : of_host) longest = larger(longest, part.count);
  return by_chunk(schedule, of_host, slice_elements(longest, 1, element), element);
}

// Returns how many elements of each of `parts` parts are summed in scratch memory at once.
std::size_t Collectives::wave_elements(const Scope& scope, std::size_t count, int parts) const {
  const std::size_t room = kWaveBytes / (scope.sum_element * static_cast<std::size_t>(parts));
  return larger(align_of(scope.element), smaller(room / 64 * 64, count));
}

}  // namespace ringcomm::hierarchy
