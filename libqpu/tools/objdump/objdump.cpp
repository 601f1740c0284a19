#include "tools/objdump/objdump.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "code/listing.hpp"
#include "code/serialise.hpp"
#include "isa/text.hpp"
#include "isa/verify.hpp"
#include "version.hpp"

namespace qpu::objdump {
namespace {

constexpr const char* kHelp =
    "usage: qpu-objdump [--raw] [--fields | --verify] FILE\n"
    "       qpu-objdump --assemble [--output FILE] FILE\n"
    "\n"
    "List the instructions of a compiled QPU program: a kernel saved by libqpu, or\n"
    "raw 64-bit little-endian words. If FILE is -, read standard input.\n"
    "\n"
    "  --raw          read FILE as raw words, even if it starts like a saved kernel\n"
    "  --fields       also print fields that have no effect, so that the text assembles\n"
    "                 to the same words; example: nop; with raddr_a=3\n"
    "  --verify       print violations of hardware rules instead of a listing; exit\n"
    "                 with code 1 if there are any\n"
    "  --assemble     read FILE as text, one instruction per line as in a listing, and\n"
    "                 write its words; # starts a comment\n"
    "  --output FILE  with --assemble, write to FILE instead of standard output\n"
    "  --version      print the version of libqpu\n"
    "  --help         print this text\n";

constexpr std::size_t kMostBytes = std::size_t{4} << 20U;
constexpr std::size_t kWordBytes = sizeof(isa::Word);

// Errors that end the program. WrongUse results in exit code 2, and Failure in exit code 1.
struct WrongUse : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  bool help = false;
  bool version = false;
  bool raw = false;
  bool fields = false;
  bool verify = false;
  bool assemble = false;
  std::optional<std::string> output;
  std::optional<std::string> file;
};

Options parse(const std::vector<std::string>& arguments) {
  constexpr std::string_view kOutput = "--output=";
  Options o;
  bool onlyFiles = false;
  for (std::size_t n = 0; n < arguments.size(); ++n) {
    const std::string& a = arguments[n];
    if (onlyFiles || a == "-" || a.empty() || a[0] != '-') {
      if (o.file) throw WrongUse("expected one file, also found '" + a + "'");
      o.file = a;
    } else if (a == "--") {
      onlyFiles = true;
    } else if (a == "--help") {
      o.help = true;
    } else if (a == "--version") {
      o.version = true;
    } else if (a == "--raw") {
      o.raw = true;
    } else if (a == "--fields") {
      o.fields = true;
    } else if (a == "--verify") {
      o.verify = true;
    } else if (a == "--assemble") {
      o.assemble = true;
    } else if (a == "--output") {
      if (++n == arguments.size()) throw WrongUse("--output needs a file");
      o.output = arguments[n];
    } else if (a.rfind(kOutput, 0) == 0) {
      o.output = a.substr(kOutput.size());
    } else {
      throw WrongUse("unknown argument '" + a + "'");
    }
  }
  if (o.help || o.version) return o;
  if (!o.file) throw WrongUse("no file given");
  if (o.assemble && (o.raw || o.verify || o.fields))
    throw WrongUse("--assemble cannot be used with --raw, --fields or --verify");
  if (o.fields && o.verify) throw WrongUse("--fields cannot be used with --verify");
  if (o.output && !o.assemble) throw WrongUse("--output requires --assemble");
  return o;
}

std::string nameOf(const std::string& file) { return file == "-" ? "standard input" : file; }

std::string readAll(std::istream& in, const std::string& name) {
  std::string data(kMostBytes + 1, '\0');
  in.read(data.data(), static_cast<std::streamsize>(data.size()));
  if (in.bad()) throw Failure("cannot read " + name);
  data.resize(static_cast<std::size_t>(in.gcount()));
  if (data.size() > kMostBytes)
    throw Failure(name + " is larger than 4 MiB, the maximum size of a program");
  return data;
}

std::string readFile(const std::string& file, std::istream& standardInput) {
  if (file == "-") return readAll(standardInput, nameOf(file));
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored)) throw Failure(file + " is a directory");
  std::ifstream in(file, std::ios::binary);
  if (!in) throw Failure("cannot open " + file);
  return readAll(in, file);
}

code::Object readProgram(const Options& options, std::istream& in) {
  const std::string data = readFile(*options.file, in);
  const std::string name = nameOf(*options.file);
  if (!options.raw && code::looksSaved(data)) {
    if (auto object = code::load(data)) return *object;
    throw Failure(name + " is a saved kernel that is damaged or was saved by another version of libqpu");
  }
  if (data.empty()) throw Failure(name + " is empty");
  if (data.size() % kWordBytes != 0)
    throw Failure(name + " is neither a saved kernel nor raw 64-bit words: its size of " +
                  std::to_string(data.size()) + " bytes is not a multiple of 8");
  code::Object object;
  object.name = name;
  object.words.resize(data.size() / kWordBytes);
  for (std::size_t n = 0; n < data.size(); ++n)
    object.words[n / kWordBytes] |= isa::Word{static_cast<unsigned char>(data[n])}
                                    << n % kWordBytes * 8;
  return object;
}

int verify(const code::Object& object, const std::string& name, std::ostream& out) {
  const std::vector<isa::Fault> faults = isa::verify(object.words);
  for (const isa::Fault& f : faults) {
    out << name << ": " << f.rule << ": " << f.text;
    const bool hasSite = f.instruction < object.siteOf.size() &&
                         object.siteOf[f.instruction] < object.sites.size();
    if (hasSite) out << " [" << object.sites[object.siteOf[f.instruction]].description << "]";
    out << "\n";
  }
  out << name << ": " << object.words.size()
      << (object.words.size() == 1 ? " instruction, " : " instructions, ");
  if (faults.empty())
    out << "no faults\n";
  else
    out << faults.size() << (faults.size() == 1 ? " fault\n" : " faults\n");
  return faults.empty() ? 0 : 1;
}

// If lines contain errors, throws a single Failure that lists the errors in all lines.
std::string assemble(const std::string& text, const std::string& name) {
  std::string words;
  std::string errors;
  std::size_t number = 0;
  for (std::size_t from = 0; from < text.size();) {
    const std::size_t end = std::min(text.find('\n', from), text.size());
    std::string line = text.substr(from, end - from);
    from = end + 1;
    ++number;
    line.resize(std::min(line.find('#'), line.size()));
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    try {
      const isa::Word word = isa::assemble(line);
      for (std::size_t n = 0; n < kWordBytes; ++n)
        words += static_cast<char>(word >> (8 * n) & 0xffU);
    } catch (const std::invalid_argument& e) {
      if (!errors.empty()) errors += "\n";
      errors += name + ":" + std::to_string(number) + ": " + e.what();
    }
  }
  if (!errors.empty()) throw Failure(errors);
  return words;
}

int assembleFile(const Options& options, const Streams& streams) {
  if (!options.output && streams.outIsTerminal)
    throw WrongUse("refusing to write binary words to a terminal: use --output FILE");
  const std::string words =
      assemble(readFile(*options.file, streams.in), nameOf(*options.file));
  if (!options.output) {
    streams.out << words;
    return 0;
  }
  std::ofstream file(*options.output, std::ios::binary | std::ios::trunc);
  file << words;
  file.close();
  if (!file) throw Failure("cannot write " + *options.output);
  return 0;
}

int dispatch(const Options& options, const Streams& streams) {
  if (options.help) {
    streams.out << kHelp;
    return 0;
  }
  if (options.version) {
    streams.out << QPU_VERSION << "\n";
    return 0;
  }
  if (options.assemble) return assembleFile(options, streams);
  const code::Object object = readProgram(options, streams.in);
  if (options.verify) return verify(object, nameOf(*options.file), streams.out);
  streams.out << code::listing(object, nullptr,
                               options.fields ? isa::Fields::All : isa::Fields::Used);
  return 0;
}

}  // namespace

int run(const std::vector<std::string>& arguments, const Streams& streams) {
  int code = 0;
  try {
    code = dispatch(parse(arguments), streams);
  } catch (const WrongUse& e) {
    streams.errors << "qpu-objdump: " << e.what() << "; see qpu-objdump --help\n";
    return 2;
  } catch (const std::exception& e) {
    streams.errors << "qpu-objdump: " << e.what() << "\n";
    return 1;
  }
  if (streams.out.flush()) return code;
  streams.errors << "qpu-objdump: cannot write to standard output\n";
  return 1;
}

}  // namespace qpu::objdump
