#include "cuda/tuning/table.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <tuple>

#include "core/call/parts.h"
#include "core/error.h"
#include "cuda/tuning/plan.h"
#include "runtime/checksum.h"

namespace ringcomm::cuda {

namespace {

// `where`: the file and the line, for errors.
[[noreturn]] void refuse(const std::string& where, const std::string& why) {
  fail(ErrorCode::kInvalid, "tuning: ", where, ": ", why,
       "; write the file with `ringcomm tune`, or unset RINGCOMM_TUNING");
}

Op op_of(const std::string& text, const std::string& where) {
  for (int i = 0; i < static_cast<int>(Op::kBarrier); ++i)
    if (text == name(static_cast<Op>(i))) return static_cast<Op>(i);
  refuse(where, "expected an op such as all_reduce, got " + quoted(text));
}

Algorithm algorithm_of(const std::string& text, Op op, const std::string& where) {
  for (int i = 1; i <= static_cast<int>(Algorithm::kCopyEngine); ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    if (text != name(algorithm)) continue;
    const bool ring = algorithm == Algorithm::kRing;
    if (ring && reduces(op)) refuse(where, "expected an algorithm that keeps the bits of a reduction, got ring");
    if (ring && op != Op::kAllGather && op != Op::kBroadcast) refuse(where, std::string(name(op)) + " has no ring");
    if (algorithm == Algorithm::kOneshot && op != Op::kAllReduce) refuse(where, "only all_reduce has oneshot");
    if (algorithm == Algorithm::kCopyEngine && op != Op::kAllGather && op != Op::kAllToAll)
      refuse(where, "only all_gather and all_to_all have copy_engine");
    return algorithm;
  }
  refuse(where, "expected direct, oneshot, ring or copy_engine, got " + quoted(text));
}

std::uint64_t number_of(const std::string& text, const char* what, std::uint64_t least, std::uint64_t most,
                        const std::string& where) {
  std::size_t used = 0;
  std::uint64_t value = 0;
  try {
    value = std::stoull(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used != text.size() || text[0] == '-' || value < least || value > most)
    refuse(where, concat("expected ", what, " from ", least, " to ", most, ", got ", quoted(text)));
  return value;
}

Tuning::Entry entry_of(const std::string& line, const std::string& where) {
  std::istringstream in(line.substr(0, line.find('#')));
  std::string op, world_size, bytes, algorithm, channels, threads, more;
  if (!(in >> op >> world_size >> bytes >> algorithm >> channels >> threads) || in >> more)
    refuse(where, "expected six columns (op, world_size, up_to_bytes, algorithm, channels, threads)");
  Tuning::Entry entry{};
  entry.op = op_of(op, where);
  entry.world_size = static_cast<int>(number_of(world_size, "a world_size", 1, kMaxRanks, where));
  constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
  entry.up_to_bytes = bytes == "max" ? kMost : number_of(bytes, "up_to_bytes", 0, kMost, where);
  entry.algorithm = algorithm_of(algorithm, entry.op, where);
  if (entry.algorithm == Algorithm::kOneshot && entry.world_size > kMaxPacketRanks)
    refuse(where,
           concat("expected a world_size of at most ", kMaxPacketRanks, " with oneshot, got ", entry.world_size));
  entry.channels = static_cast<int>(number_of(channels, "channels", 0, 65535, where));
  entry.threads = static_cast<int>(number_of(threads, "threads", 0, kMostBlockThreads, where));
  if (entry.threads % kBlockThreadsStep != 0)
    refuse(where, "expected a multiple of " + std::to_string(kBlockThreadsStep) + " threads, got " + threads);
  return entry;
}

// Returns the rest of a line that begins with `word`; empty if it does not.
std::string after(const std::string& word, const std::string& line) {
  std::istringstream in(line.substr(0, line.find('#')));
  std::string first, rest;
  if (!(in >> first) || first != word) return "";
  std::getline(in >> std::ws, rest);
  return rest.substr(0, rest.find_last_not_of(" \t\r") + 1);
}

auto key(const Tuning::Entry& e) { return std::make_tuple(e.op, e.world_size, e.up_to_bytes); }

}  // namespace

Tuning Tuning::parse(const std::string& text, const std::string& source) {
  Tuning tuning;
  tuning.source_ = source;
  std::istringstream in(text);
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const auto first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    if (const std::string device = after("device", line); !device.empty())
      tuning.device_ = device;
    else if (const std::string links = after("links", line); !links.empty())
      tuning.links_ = links;
    else
      tuning.entries_.push_back(entry_of(line, concat(source, " line ", number)));
  }
  std::stable_sort(tuning.entries_.begin(), tuning.entries_.end(),
                   [](const Entry& a, const Entry& b) { return key(a) < key(b); });
  return tuning;
}

Tuning Tuning::from_environment() {
  const char* const path = std::getenv("RINGCOMM_TUNING");
  if (!path || !*path) return {};
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file)
    fail(ErrorCode::kInvalid, "tuning: RINGCOMM_TUNING expected a readable file with entries, got ", path,
         "; write it with `ringcomm tune`, or unset the variable");
  return parse(text, path);
}

int Tuning::most_channels() const {
  int most = 0;
  for (const Entry& e : entries_)
    if (e.channels > kUsualChannels) most = std::max(most, std::min(e.channels, kMaxChannels));
  return most;
}

std::uint64_t Tuning::checksum() const {
  std::string text = concat(device_, '\n', links_, '\n');
  for (const Entry& e : entries_)
    text += concat(static_cast<int>(e.op), ' ', e.world_size, ' ', e.up_to_bytes, ' ', static_cast<int>(e.algorithm),
                   ' ', e.channels, ' ', e.threads, '\n');
  return fingerprint(text);
}

bool Tuning::serves(int world_size) const {
  return world_size > 1 &&
         std::any_of(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.world_size == world_size; });
}

void Tuning::check_measured_on(const std::string& device, Path::Kind kind, int rank) const {
  const std::string links = name(kind);
  const bool same_links = links_.empty() || links_ == links || kind == Path::kUnknown;
  if ((device_.empty() || device_ == device) && same_links) return;
  fail(ErrorCode::kInvalid, "connect: rank ", rank, " expected a tuning file measured on ", device,
       " over links of kind ", quoted(links), ", got ", source_, ", measured on ",
       device_.empty() ? "any device" : device_, " over links of kind ", quoted(links_.empty() ? "any" : links_),
       "; measure anew with `ringcomm tune`, or unset RINGCOMM_TUNING");
}

const Tuning::Entry* Tuning::find(Op op, int world_size, std::uint64_t nbytes) const {
  const auto wanted = std::make_tuple(op, world_size, nbytes);
  const auto it = std::lower_bound(entries_.begin(), entries_.end(), wanted,
                                   [](const Entry& e, const auto& k) { return key(e) < k; });
  return it != entries_.end() && it->op == op && it->world_size == world_size ? &*it : nullptr;
}

}  // namespace ringcomm::cuda
