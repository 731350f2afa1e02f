#include "cuda/memory/control_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "core/error.h"
#include "runtime/identity.h"

namespace ringcomm::cuda {

namespace {

constexpr std::uint64_t kMagic = 0x72696e67'6d61696cu;  // "ringmail"

struct Packet {
  std::uint64_t magic;
  Identity secret, subject;
  std::uint32_t kind;
  std::int32_t from, code;
  std::uint64_t call;
  char text[468];
};

constexpr std::size_t kNameBytes = sizeof("ringcomm-") - 1 + 32;
constexpr auto kAddressBytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + kNameBytes);

// The first kAddressBytes bytes count.
sockaddr_un socket_address(const Identity& identity) {
  const std::string text = "ringcomm-" + text_of(identity);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, text.data(), kNameBytes);  // a zero first: abstract
  return address;
}

// The 22nd field of /proc/<pid>/stat; 0: no such process, or only its shell is left.
std::uint64_t start_of(int pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return 0;
  std::istringstream fields(line.substr(line.rfind(')') + 1));  // the name before may have any characters
  std::string state, skipped;
  fields >> state;
  if (state == "Z" || state == "X") return 0;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  std::uint64_t start = 0;
  fields >> start;
  return start;
}

}  // namespace

Identity random_identity() { return {random_number(), random_number()}; }

std::string text_of(const Identity& identity) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(identity[0]),
                static_cast<unsigned long long>(identity[1]));
  return text;
}

Identity identity_of(const std::string& text) {
  if (text.size() != 32 || text.find_first_not_of("0123456789abcdef") != std::string::npos) return {};
  return {std::stoull(text.substr(0, 16), nullptr, 16), std::stoull(text.substr(16), nullptr, 16)};
}

Process Process::self() { return {getpid(), start_of(getpid())}; }

bool Process::has_exited() const { return start_of(pid) != start; }

ControlSocket::ControlSocket() : address_{random_identity(), random_identity()} {
  socket_ = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const sockaddr_un address = socket_address(address_.name);
  if (socket_ < 0 || bind(socket_, reinterpret_cast<const sockaddr*>(&address), kAddressBytes) != 0) {
    const int reason = errno;
    if (socket_ >= 0) ::close(socket_);
    fail(ErrorCode::kSystem, "communicator: expected a local socket for the exchange with the other ranks, got \"",
         std::strerror(reason), "\"; see the limits of open files and of the sandbox");
  }
}

ControlSocket::~ControlSocket() {
  for (const ControlMessage& message : unread_)
    if (message.fd >= 0) ::close(message.fd);
  if (socket_ >= 0) ::close(socket_);
}

ControlSocket::SendResult ControlSocket::send(const Address& to, const ControlMessage& message) const noexcept {
  Packet packet{};
  packet.magic = kMagic;
  packet.secret = to.secret;
  packet.subject = message.subject;
  packet.kind = message.kind;
  packet.from = message.from;
  packet.code = message.code;
  packet.call = message.call;
  std::memcpy(packet.text, message.text.data(), std::min(message.text.size(), sizeof packet.text - 1));
  sockaddr_un address = socket_address(to.name);
  iovec content{&packet, sizeof packet};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr io{};
  io.msg_name = &address;
  io.msg_namelen = kAddressBytes;
  io.msg_iov = &content;
  io.msg_iovlen = 1;
  if (message.fd >= 0) {
    io.msg_control = control;
    io.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&io);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &message.fd, sizeof(int));
  }
  ssize_t sent;
  do sent = sendmsg(socket_, &io, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  if (sent >= 0) return SendResult::kSent;
  return errno == EAGAIN || errno == ENOBUFS ? SendResult::kFull : SendResult::kUnreachable;
}

bool ControlSocket::receive(int timeout_ms) {
  pollfd watched{socket_, POLLIN, 0};
  if (poll(&watched, 1, timeout_ms) <= 0) return false;
  Packet packet{};
  iovec content{&packet, sizeof packet};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr io{};
  io.msg_iov = &content;
  io.msg_iovlen = 1;
  io.msg_control = control;
  io.msg_controllen = sizeof control;
  const ssize_t nbytes = recvmsg(socket_, &io, MSG_CMSG_CLOEXEC);
  if (nbytes < 0) return false;
  ControlMessage message;
  for (cmsghdr* header = CMSG_FIRSTHDR(&io); header; header = CMSG_NXTHDR(&io, header))
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
      std::memcpy(&message.fd, CMSG_DATA(header), sizeof(int));
  if (nbytes != sizeof packet || packet.magic != kMagic || packet.secret != address_.secret) {
    if (message.fd >= 0) ::close(message.fd);
    return true;  // from a stranger
  }
  message.kind = static_cast<ControlMessage::Kind>(packet.kind);
  message.from = packet.from;
  message.code = packet.code;
  message.call = packet.call;
  message.subject = packet.subject;
  packet.text[sizeof packet.text - 1] = 0;
  message.text = packet.text;
  unread_.push_back(std::move(message));
  return true;
}

template <typename Predicate>
bool ControlSocket::take_if(const Predicate& matches, ControlMessage& message) {
  const auto found = std::find_if(unread_.begin(), unread_.end(), matches);
  if (found == unread_.end()) return false;
  message = std::move(*found);
  unread_.erase(found);
  return true;
}

bool ControlSocket::take(ControlMessage::Kind kind, int from, const Identity* subject, ControlMessage& message) {
  return take_if(
      [&](const ControlMessage& m) {
        return m.kind == kind && (from < 0 || m.from == from) && (!subject || m.subject == *subject);
      },
      message);
}

bool ControlSocket::take(ControlMessage::Kind kind, int from, std::uint64_t last, ControlMessage& message) {
  return take_if(
      [&](const ControlMessage& m) { return m.kind == kind && (from < 0 || m.from == from) && m.call <= last; },
      message);
}

}  // namespace ringcomm::cuda
