#include "runtime/report.hpp"

#include <algorithm>

#include "qpu/backend.h"
#include "qpu/error.h"
#include "runtime/machine.hpp"

namespace qpu::runtime {
namespace {

V3dFacts v3dFacts(const Opened* opened) {
  V3dFacts facts;
  if (opened == nullptr || !opened->device) {
    facts.source = opened == nullptr ? "not read: no hardware backend was tried"
                                     : "not read: " + opened->fault;
    return facts;
  }
  Device& device = *opened->device;
  try {
    facts.clockHz = device.clockHz();
    facts.source = "firmware, mailbox tag 0x00030002";
    if (device.fault(Method::Registers).empty()) {
      const auto [ident0, ident1] = device.identity();
      facts.ident0 = ident0;
      facts.ident1 = ident1;
      facts.source = "V3D's registers; clock: " + facts.source;
    }
  } catch (const Error& e) {
    facts.source = std::string("not read: ") + e.what();
  }
  return facts;
}

}  // namespace

std::vector<User> usersOf(const std::string& folder) {
  std::vector<User> users;
  for (const Record& r : readState(folder)) {
    auto found = std::find_if(users.begin(), users.end(),
                              [&r](const User& u) { return u.pid == r.process.pid; });
    if (found == users.end()) {
      User user;
      user.pid = r.process.pid;
      user.alive = r.process.alive();
      found = users.insert(users.end(), user);
    }
    if (r.kind == Record::Kind::Holder) {
      found->holds = true;
    } else {
      ++found->pieces;
      found->bytes += r.bytes;
    }
  }
  return users;
}

Findings findAll(const Host& host) {
  Findings f;
  const Choice& choice = currentChoice();
  f.library = {version(), choice.name == nullptr ? "" : choice.name, choice.text};
  f.board = readBoard(host.root);
  f.system = readSystem(host.root, host.os);
  f.stateFolder = stateFolder();
  if (host.os == nullptr) {
    f.v3d.source = "not read: the root is not /";
    return f;
  }
  // Read the list of users before this process opens the device, so that the list does not
  // include this process.
  f.users = usersOf(f.stateFolder);
  f.backends = backendFindings();
  const Opened* const opened = openedDevice();
  f.v3d = v3dFacts(opened);
  if (opened != nullptr && opened->device) f.note = opened->device->openingNote();
  return f;
}

}  // namespace qpu::runtime
