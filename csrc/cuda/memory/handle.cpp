#include "cuda/memory/handle.h"

#include <cstdlib>
#include <cstring>
#include <sstream>

#include "core/error.h"
#include "core/types.h"
#include "runtime/checksum.h"

namespace ringcomm::cuda {

namespace {

constexpr const char* kVersion = "ringcomm-cuda-7";

std::string or_dash(const std::string& text) { return text.empty() ? "-" : text; }
std::string dash_to_empty(const std::string& text) { return text == "-" ? "" : text; }

// The numbers of a layout by their names.
template <typename Visit>
void for_each_number(Layout& layout, const Visit& visit) {
  visit("channels", layout.channels);
  visit("depth", layout.depth);
  visit("slot_bytes", layout.slot_bytes);
  visit("stage_bytes", layout.stage_bytes);
  visit("packet_bytes", layout.packet_bytes);
  visit("p2p_channels", layout.p2p_channels);
  visit("p2p_depth", layout.p2p_depth);
  visit("p2p_slot_bytes", layout.p2p_slot_bytes);
}

void set_number(Layout& layout, const std::string& setting) {
  const std::size_t equals = setting.find('=');
  const std::string key = setting.substr(0, equals);
  const std::string digits = equals == std::string::npos ? "" : setting.substr(equals + 1);
  bool known = false;
  if (!digits.empty() && digits.size() < 10 && digits.find_first_not_of("0123456789") == std::string::npos)
    for_each_number(layout, [&](const char* name, auto& number) {
      if (key != name) return;
      number = static_cast<std::decay_t<decltype(number)>>(std::stoull(digits));
      known = true;
    });
  if (!known)
    fail(ErrorCode::kInvalid, "communicator: expected RINGCOMM_CUDA_LAYOUT like \"", text_of(Layout{}), "\", got \"",
         setting, "\" in it; correct or unset it");
}

}  // namespace

std::string text_of(const Layout& layout) {
  std::string text;
  for_each_number(const_cast<Layout&>(layout), [&](const char* name, const auto& number) {
    text += concat(text.empty() ? "" : ",", name, '=', number);
  });
  return text;
}

Layout default_layout(int world_size, const EngineOptions& options) {
  Layout layout;
  layout.world_size = world_size;
  layout.channels = options.channels > 0 ? options.channels : kUsualChannels;
  layout.depth = 4;
  layout.slot_bytes = options.slot_bytes ? options.slot_bytes : 256 * 1024;
  layout.stage_bytes = 512 * 1024;
  layout.packet_bytes = 6 * 1920;                  // 24 channels carry 256 KiB, the most that auto sends as packets
  layout.p2p_channels = world_size <= 8 ? 16 : 8;  // a rank has a board for each, from every peer
  layout.p2p_depth = 4;
  layout.p2p_slot_bytes = 64 * 1024;
  if (const char* const settings = std::getenv("RINGCOMM_CUDA_LAYOUT")) {
    std::istringstream in(settings);
    for (std::string setting; std::getline(in, setting, ',');) set_number(layout, setting);
  }
  layout.slot_bytes = round_up(layout.slot_bytes, kLineBytes);
  layout.p2p_slot_bytes = round_up(layout.p2p_slot_bytes, kLineBytes);
  layout.stage_bytes = round_up(layout.stage_bytes, kLineBytes * world_size);
  layout.packet_bytes = world_size <= kMaxPacketRanks ? round_up(layout.packet_bytes, 1920) : 0;
  return layout;
}

std::string pack(const MemoryHandle& handle) {
  static const char digits[] = "0123456789abcdef";
  unsigned char bytes[sizeof handle];
  std::memcpy(bytes, &handle, sizeof handle);
  std::string text;
  for (const unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

bool unpack(const std::string& text, MemoryHandle& handle) {
  unsigned char bytes[sizeof handle] = {};
  if (text.size() != 2 * sizeof handle || text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (std::size_t i = 0; i < sizeof handle; ++i)
    bytes[i] = static_cast<unsigned char>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  std::memcpy(&handle, bytes, sizeof handle);
  return handle.magic == kMemoryMagic;
}

std::string RankHandle::pack() const {
  std::ostringstream out;
  out << machine << ' ' << instance << ' ' << process.pid << ' ' << process.start << ' ' << rank << ' '
      << layout.world_size << ' ' << text_of(layout) << ' ' << text_of(identity) << ' ' << text_of(control.name) << ' '
      << text_of(control.secret) << ' ' << or_dash(settings) << ' ' << device << ' ' << or_dash(uuid) << ' '
      << or_dash(bus_id) << ' ' << cuda::pack(segment) << ' ' << paths.size();
  for (const auto& [to, path] : paths) out << ' ' << to << ' ' << int{path.kind} << ' ' << path.performance_rank;
  out << ' ' << or_dash(why_private);
  return add_checksum(kVersion, out.str());
}

RankHandle RankHandle::unpack(const std::string& text, int rank) {
  RankHandle h;
  std::string layout, identity, name, secret, segment;
  std::size_t num_paths = 0;
  std::istringstream in(strip_checksum(kVersion, text, "cuda", rank));
  in >> h.machine >> h.instance >> h.process.pid >> h.process.start >> h.rank >> h.layout.world_size >> layout >>
      identity >> name >> secret >> h.settings >> h.device >> h.uuid >> h.bus_id >> segment >> num_paths;
  for (std::size_t i = 0; in && i < num_paths; ++i) {
    std::string to;
    int kind = 0;
    Path path;
    in >> to >> kind >> path.performance_rank;
    path.kind = kind >= Path::kUnknown && kind <= Path::kSame ? static_cast<Path::Kind>(kind) : Path::kUnknown;
    h.paths.emplace_back(to, path);
  }
  std::getline(in >> std::ws, h.why_private);
  cuda::unpack(segment, h.segment);
  std::istringstream settings(layout);
  for (std::string setting; std::getline(settings, setting, ',');) set_number(h.layout, setting);
  h.identity = identity_of(identity);
  h.control = {identity_of(name), identity_of(secret)};
  h.settings = dash_to_empty(h.settings);
  h.uuid = dash_to_empty(h.uuid);
  h.bus_id = dash_to_empty(h.bus_id);
  h.why_private = dash_to_empty(h.why_private);
  return h;
}

std::string RankHandle::device_text() const { return concat("GPU ", device, " (", bus_id, ")"); }

Path RankHandle::path_to(const RankHandle& other) const {
  if (uuid == other.uuid) return {Path::kSame, 0};
  for (const auto& [to, path] : paths)
    if (to == other.uuid) return path;
  return {};
}

}  // namespace ringcomm::cuda
