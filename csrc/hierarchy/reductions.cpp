// all_reduce, reduce and reduce_scatter over several hosts.
#include <algorithm>
#include <cstring>

#include "hierarchy/collectives.h"

namespace ringcomm::hierarchy {

// Sums up, over this host's ranks, the elements of this rank's rails; puts the sums into `sums` at their places in the
// message.
void Collectives::reduce_inside(const Scope& scope, const Cut& cut, const char* input, char* sums) {
  Call call = local_call(scope, Op::kReduceScatter);
  call.dtype = scope.types.sum;
  if (scope.wider()) {
    widen(scope, input, sums, cut.count());
    input = sums;
  }
  if (topology_.local_world_size() == 1 && input == sums && call.reduce_op != ReduceOp::kPremulSum) return;
  call.input_parts = cut.parts(input, scope.sum_element);
  call.output = at(sums, cut.mine().offset, scope.sum_element);
  call.count = cut.mine().count;
  run_inside({call});
}

void Collectives::widen(const Scope& scope, const void* source, void* target, std::size_t count) {
  if (count) local_->pack({scope.call.dtype, scope.types.sum, 1.0, {{source, target, count}}, scope.call.stream});
}

// Returns the rails of this rank, of a message whose elements are all in `sums` and `results`.
std::vector<Rail> Collectives::rails_of(const Scope& scope, const Cut& cut, char* sums, char* results) const {
  const int hosts = topology_.num_hosts();
  std::vector<Rail> rails;
  for (int l = cut.first(); l < cut.last(); ++l) {
    const Slice s = cut.rail(l);
    const std::size_t slice = slice_elements(s.count, hosts, scope.sum_element);
    Rail rail{l, cut.rail_ranks(l), scope.schedule, true, true, scope.op, scope.divisor, scope.types, {}, {}};
    rail.sums = Chunks::whole(at(sums, s.offset, scope.sum_element), s.count, hosts, slice, scope.sum_element);
    rail.results = Chunks::whole(at(results, s.offset, scope.element), s.count, hosts, slice, scope.element);
    rails.push_back(std::move(rail));
  }
  return rails;
}

// Whether the message of an all_reduce is so short that it may follow the signature: one round in place of three and
// more outweighs that a host sends it to each other host, unless there are many.
bool Collectives::fits_signature(const Scope& scope) const {
  constexpr std::size_t kForManyHosts = 8 << 10;
  const Call& call = scope.call;
  const bool in_order = call.algorithm != Algorithm::kRing;
  const std::size_t room = transport_->inline_bytes(), others = larger(1, topology_.num_hosts() - 1);
  const std::size_t most = smaller(room, larger(kForManyHosts, room / others));
  return call.count && in_order && !options_.compressed && call.count * scope.sum_element <= most;
}

// A short message follows the signature completely, from each host's first rank to those of the others: one round.
void Collectives::all_reduce_at_once(const Scope& scope) {
  const Call& call = scope.call;
  const int hosts = topology_.num_hosts(), me = topology_.host();
  const std::size_t nbytes = call.count * scope.sum_element, room = aligned(nbytes);
  char* const memory = scratch(static_cast<std::size_t>(hosts + 1) * room);
  const void* input = call.input;
  if (scope.wider()) {
    widen(scope, call.input, memory + static_cast<std::size_t>(hosts) * room, call.count);
    input = memory + static_cast<std::size_t>(hosts) * room;
  }
  std::vector<char*> parts;
  for (int h = 0; h < hosts; ++h) parts.push_back(memory + static_cast<std::size_t>(h) * room);
  Call inside = local_call(scope, Op::kReduce);
  inside.dtype = scope.types.sum;
  inside.input = input;
  inside.output = parts[me];
  inside.count = call.count;
  run_inside({inside});

  // All ranks compare signatures, as in the calls that could meet this one; the first ranks exchange sums with them.
  const bool first = topology_.local_rank() == 0;
  std::vector<int> peers = partners(scope.schedule, Cut(topology_, call.count, scope.element).rail_ranks());
  if (first)
    for (int h = 0; h < hosts; ++h)
      if (h != me) peers.push_back(topology_.ranks(h)[0]);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  const std::vector<std::string> theirs = agree(scope, peers, first ? std::string(parts[me], nbytes) : "");
  if (first) {
    for (std::size_t i = 0; i < peers.size(); ++i)
      if (!theirs[i].empty()) std::memcpy(parts[topology_.host_of(peers[i])], theirs[i].data(), nbytes);
    for (const Merge& merge : topology_.tree()) {
      const bool last = &merge == &topology_.tree().back();
      char* const sum = parts[merge.into];
      local_->combine({scope.types.sum, last ? scope.op : combine_of(scope.op), sum, parts[merge.from], sum, call.count,
                       last ? scope.divisor : 1, call.stream});
    }
    const void* const sum = parts[topology_.tree().back().into];
    local_->pack({scope.types.sum, scope.types.result, 1.0, {{sum, call.output, call.count}}, call.stream});
  }
  if (topology_.local_world_size() == 1) return;
  inside = local_call(scope, Op::kBroadcast);
  inside.input = inside.output = call.output;
  inside.count = call.count;
  run_inside({inside});
}

void Collectives::all_reduce(const Scope& scope) {
  const Call& call = scope.call;
  agree(scope, partners(scope.schedule, Cut(topology_, call.count, scope.element).rail_ranks()));
  const std::size_t wave = scope.wider() ? wave_elements(scope, call.count, 1) : call.count;
  for (std::size_t begin = 0; begin < call.count; begin += wave) {
    const Cut cut(topology_, smaller(wave, call.count - begin), scope.element);
    char* const output = at(call.output, begin, scope.element);
    const std::size_t sum_bytes = scope.wider() ? aligned(cut.count() * scope.sum_element) : 0;
    char* const memory = scratch(sum_bytes + scratch_for(rails_of(scope, cut, output, output)));
    char* const sums = scope.wider() ? memory : output;
    reduce_inside(scope, cut, at(call.input, begin, scope.element), sums);
    run_rails(scope, rails_of(scope, cut, sums, output), memory + sum_bytes);
    gather_inside(scope, cut, output);
  }
}

// Like all_reduce until every chunk is complete on one host; then the chunks go to the root's host, and there to the
// root.
void Collectives::reduce(const Scope& scope) {
  const Call& call = scope.call;
  const int hosts = topology_.num_hosts(), root_host = topology_.host_of(call.root);
  const bool here = root_host == topology_.host();
  const auto rail_ranks = Cut(topology_, call.count, scope.element).rail_ranks();
  std::vector<int> peers = partners(scope.schedule, rail_ranks);
  for (const auto& rail : rail_ranks)
    for (int h = 0; h < hosts; ++h)
      if (here ? h != root_host : h == root_host) peers.push_back(rail[h]);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  agree(scope, peers);

  const std::size_t wave = wave_elements(scope, call.count, 1);
  for (std::size_t begin = 0; begin < call.count; begin += wave) {
    const Cut cut(topology_, smaller(wave, call.count - begin), scope.element);
    const std::size_t sum_bytes = aligned(cut.count() * scope.sum_element),
                      result_bytes = scope.wider() ? aligned(cut.count() * scope.element) : 0;
    std::vector<Rail> rails = rails_of(scope, cut, nullptr, nullptr);
    for (Rail& rail : rails) rail.gathers = false;
    char* const sums = scratch(sum_bytes + result_bytes + scratch_for(rails));
    char* const results = scope.wider() ? sums + sum_bytes : sums;
    reduce_inside(scope, cut, at(call.input, begin, scope.element), sums);
    rails = rails_of(scope, cut, sums, results);
    for (Rail& rail : rails) rail.gathers = false;
    run_rails(scope, rails, sums + sum_bytes + result_bytes);
    ExchangeRound round;
    for (const Rail& rail : rails)
      for (int h = 0; h < hosts; ++h) {
        if (h == root_host || (!here && h != topology_.host())) continue;
        const int chunk = owned_chunk(rail.schedule, hosts, h);
        for (std::size_t w = 0; w < rail.results.windows(); ++w) {
          const Part part = rail.results.at(chunk, w);
          if (part.count == 0) continue;
          auto& list = here ? round.messages.recvs : round.messages.sends;
          list.push_back({rail.ranks[here ? h : root_host], part.data, part.count * scope.element});
        }
      }
    run_round(scope, std::move(round));
    if (here) collect(scope, cut, results, at(call.output, begin, scope.element));
  }
}

// On the root's host: sends the elements of each rank's rails to the root.
void Collectives::collect(const Scope& scope, const Cut& cut, char* results, char* output) {
  const bool at_root = scope.call.root == topology_.rank();
  const int root = topology_.local_of(scope.call.root);
  Call call = local_call(scope, Op::kAllToAll);
  call.input_parts.resize(topology_.local_world_size());
  call.output_parts.resize(topology_.local_world_size());
  call.input_parts[root] = {at(results, cut.mine().offset, scope.element), cut.mine().count};
  if (at_root) call.output_parts = cut.parts(output, scope.element);
  run_inside({call});
}

void Collectives::reduce_scatter(const Scope& scope) {
  const Call& call = scope.call;
  const Parts input = input_parts(call);
  agree(scope, partners(scope.schedule, part_rail_ranks()));
  const std::size_t longest = input.longest(topology_.world_size());
  const std::size_t wave = wave_elements(scope, longest, topology_.world_size());
  for (std::size_t begin = 0; begin < longest; begin += wave) scatter_sums(scope, input, begin, wave);
}

// Handles elements [begin, begin + wave) of every part.
void Collectives::scatter_sums(const Scope& scope, const Parts& input, std::size_t begin, std::size_t wave) {
  const int hosts = topology_.num_hosts(), here = topology_.local_world_size();
  const auto piece = [&](int rank) -> Part {
    const std::size_t count = input.count(rank);
    return {begin < count ? at(input.data(rank), begin, scope.element) : nullptr,
            begin < count ? smaller(wave, count - begin) : 0};
  };
  // Scratch memory: this rank's sums, rail by rail; then the input in the wider type.
  std::size_t sum_bytes = 0, wide_bytes = 0;
  for (int r = 0; r < topology_.world_size(); ++r) {
    const std::size_t nbytes = aligned(piece(r).count * scope.sum_element);
    if (topology_.local_of(r) % here == topology_.local_rank()) sum_bytes += nbytes;
    if (scope.wider()) wide_bytes += nbytes;
  }
  std::vector<Rail> rails;
  std::vector<std::vector<Part>> sums;  // by rail, then by host
  const auto lay_out = [&](char* memory) {
    rails.clear();
    sums.clear();
    for (int l = topology_.local_rank(); l < topology_.rails(); l += here) {
      std::vector<Part> of_host;
      for (int h = 0; h < hosts; ++h) {
        const std::size_t count = l < topology_.num_ranks(h) ? piece(topology_.ranks(h)[l]).count : 0;
        of_host.push_back({memory, count});
        if (memory) memory += aligned(count * scope.sum_element);
      }
      Rail rail{l, part_rail_ranks(l), scope.schedule, true, false, scope.op, scope.divisor, scope.types, {}, {}};
      rail.sums = rail.results = part_chunks(scope.schedule, of_host, scope.sum_element);
      rails.push_back(std::move(rail));
      sums.push_back(std::move(of_host));
    }
  };
  lay_out(nullptr);
  char* const memory = scratch(sum_bytes + wide_bytes + scratch_for(rails));
  lay_out(memory);

  std::vector<Part> pieces;
  char* wide = memory + sum_bytes;
  for (int r = 0; r < topology_.world_size(); ++r) {
    Part part = piece(r);
    if (scope.wider()) {
      widen(scope, part.data, wide, part.count);
      part.data = wide;
      wide += aligned(part.count * scope.sum_element);
    }
    pieces.push_back(part);
  }
  std::vector<Call> calls;
  for (int h = 0; h < hosts; ++h)
    for (int first = 0; first < topology_.num_ranks(h); first += here) {
      Call call = local_call(scope, Op::kReduceScatter);
      call.dtype = scope.types.sum;
      call.input_parts.resize(here);
      for (int i = 0; i < here && first + i < topology_.num_ranks(h); ++i)
        call.input_parts[i] = pieces[topology_.ranks(h)[first + i]];
      const std::size_t rail = static_cast<std::size_t>(first / here);
      call.output = rail < sums.size() ? sums[rail][h].data : nullptr;  // null where the last turn has none
      call.count = call.input_parts[topology_.local_rank()].count;
      calls.push_back(std::move(call));
    }
  run_inside(calls);
  // The result of the first rail is this rank's own part, in the output; the other rails' results are other ranks'
  // parts.
  std::vector<Part> results = sums[0];
  results[topology_.host()].data = at(scope.call.output, begin, scope.element);
  rails[0].results = by_chunk(scope.schedule, results, rails[0].sums.slice_elements(), scope.element);
  run_rails(scope, rails, memory + sum_bytes + wide_bytes);
}

}  // namespace ringcomm::hierarchy
