// ask BUNDLE/config.json WIDTH HEIGHT PICTURE.rgb QUESTION [canvas]
//
// g++ -std=c++17 -I MNN/include -I MNN/transformers/llm/engine/include main.cpp -lMNN -lllm
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>

#include "ask.hpp"

int main(int count, char** arguments) {
    if (count < 6) {
        std::cerr << "ask BUNDLE/config.json WIDTH HEIGHT PICTURE.rgb QUESTION [canvas]\n";
        return 2;
    }
    using MNN::Transformer::Llm;
    const std::unique_ptr<Llm, void (*)(Llm*)> llm(Llm::createLLM(arguments[1]), Llm::destroy);
    if (llm == nullptr || !llm->load()) return 7;
    // A picture as RGB bytes stands for what an app has decoded.
    std::ifstream file(arguments[4], std::ios::binary);
    const smolvlm::Image image{
        std::atoi(arguments[2]), std::atoi(arguments[3]),
        {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()}};
    const smolvlm::Settings settings;  // of SmolVLM-256M and 500M
    const std::vector<smolvlm::Tiles> pictures{smolvlm::cut(image, settings)};
    if (count > 6) {
        smolvlm::ask_with_canvas(*llm, pictures, arguments[5], std::cout, 128);
    } else {
        smolvlm::ask(*llm, pictures, settings, arguments[5], std::cout, 128);
    }
    std::cout << "\n";
    return 0;
}
