#include "compiler/spill_code.hpp"

#include <algorithm>

#include "compiler/spill.hpp"
#include "compiler/vpm_layout.hpp"

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kSlotBytes = 64;

Operation loadOf(Vreg target, std::uint32_t bits) {
  Operation o;
  o.op = Op::Load;
  o.target = target;
  o.constant = bits;
  return o;
}

Operation addition(Vreg target, Operand a, Operand b) {
  Operation o;
  o.op = Op::Add;
  o.add = isa::AddOp::Add;
  o.target = target;
  o.a = a;
  o.b = b;
  return o;
}

Operation effect(Op op, Vreg a = Operation::kNone) {
  Operation o;
  o.op = op;
  if (a != Operation::kNone) o.a = Operand::reg(a);
  o.unit = kSpillUnit;
  return o;
}

}  // namespace

// The address of the spill area is the first uniform. The VPM row depends on the QPU number.
std::size_t SpillCode::addPrologue() {
  base_ = f_.registers++;
  row_ = f_.registers++;
  f_.uniforms.insert(f_.uniforms.begin(), {code::Uniform::Kind::SpillBase, 0});
  auto& entry = f_.blocks[0].operations;
  Operation read;
  read.op = Op::Uniform;
  read.target = base_;
  entry.insert(entry.begin(), read);
  std::size_t at = 1;
  const auto number =
      std::find_if(entry.begin(), entry.end(), [&](const Operation& o) { return o.target == f_.qpuNumber; });
  if (f_.qpuNumber != Operation::kNone && number != entry.end())
    at = static_cast<std::size_t>(number - entry.begin()) + 1;
  std::vector<Operation> code;
  if (f_.qpuNumber == Operation::kNone || f_.spillRowStride == 0) {
    code.push_back(loadOf(row_, f_.spillRow));
  } else {
    const Vreg stride = f_.registers++;
    const Vreg rows = f_.registers++;
    const Vreg first = f_.registers++;
    code.push_back(loadOf(stride, f_.spillRowStride));
    Operation multiply;
    multiply.op = Op::Mul;
    multiply.mul = isa::MulOp::Mul24;
    multiply.target = rows;
    multiply.a = Operand::reg(f_.qpuNumber);
    multiply.b = Operand::reg(stride);
    code.push_back(multiply);
    code.push_back(loadOf(first, f_.spillRow));
    code.push_back(addition(row_, Operand::reg(rows), Operand::reg(first)));
  }
  entry.insert(entry.begin() + static_cast<std::ptrdiff_t>(at), code.begin(), code.end());
  return at + code.size();
}

void SpillCode::store(std::vector<Operation>& code, std::size_t block, Vreg v) {
  code.push_back(effect(Op::DmaStoreWait));
  code.push_back(effect(Op::VpmWriteSetup, rowWord(code, vpm::writeRows(0, 1), 0)));
  code.push_back(effect(Op::VpmWrite, v));
  code.push_back(effect(Op::VpmWriteSetup, rowWord(code, vpm::storeRow(0), vpm::kStoreRowShift)));
  code.push_back(effect(Op::DmaStoreStart, slotAddress(code, block, v, true)));
  code.push_back(effect(Op::DmaStoreWait));
}

void SpillCode::reload(std::vector<Operation>& code, std::size_t block, Vreg v) {
  code.push_back(effect(Op::VpmReadSetup, rowWord(code, vpm::loadRow(0), vpm::kLoadRowShift)));
  code.push_back(effect(Op::DmaLoadStart, slotAddress(code, block, v, false)));
  code.push_back(effect(Op::DmaLoadWait));
  code.push_back(effect(Op::VpmReadSetup, rowWord(code, vpm::readRow(0), 0)));
  Operation read = effect(Op::VpmRead);
  read.target = v;
  code.push_back(read);
}

std::uint32_t SpillCode::assignSlots() {
  std::uint32_t slots = 0;
  const std::vector<std::uint32_t> slotOf = colourSlots(f_, accesses_, slots);
  for (std::size_t i = 0; i < accesses_.size(); ++i)
    f_.blocks[accesses_[i].block].operations[accesses_[i].position].constant = slotOf[i] * kSlotBytes;
  return slots * kSlotBytes;
}

Vreg SpillCode::loadConstant(std::vector<Operation>& code, std::uint32_t bits) {
  const Vreg v = f_.registers++;
  code.push_back(loadOf(v, bits));
  return v;
}

// Returns a register that contains `bits` plus the row number, which is shifted to its field.
Vreg SpillCode::rowWord(std::vector<Operation>& code, std::uint32_t bits, std::uint32_t shift) {
  Vreg row = row_;
  if (shift != 0) {
    row = f_.registers++;
    Operation o = addition(row, Operand::reg(row_), Operand::imm(shift));
    o.add = isa::AddOp::Shl;
    code.push_back(o);
  }
  const Vreg constant = loadConstant(code, bits);
  const Vreg v = f_.registers++;
  code.push_back(addition(v, Operand::reg(constant), Operand::reg(row)));
  return v;
}

// Emits a constant 0 for the slot's offset. assignSlots() replaces this constant with the actual
// offset.
Vreg SpillCode::slotAddress(std::vector<Operation>& code, std::size_t block, Vreg v, bool isStore) {
  accesses_.push_back({v, static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(code.size()), isStore});
  const Vreg offset = loadConstant(code, 0);
  const Vreg address = f_.registers++;
  code.push_back(addition(address, Operand::reg(base_), Operand::reg(offset)));
  return address;
}

}  // namespace qpu::compiler
